// optimal_token_baseline on a GPU, for every vendor. W of a token is the sum of the weights up to and including this
// token. G of a token is the sum of the rewards from this token on. In the first step one block per sequence scans W
// from the first chunk on and G from the last chunk back. In the second step the blocks of a group process its
// positions, one thread per position. The first step leaves W of every token, and the number of unmasked tokens of each
// sequence, in a workspace for the second step.
#pragma once

#include "kernels/advantages/optimal_baseline_token.h"
#include "kernels/tokens/workspace.h"

namespace rlk {

struct BaselineWorkspace {
  float* weights;        // [slots]: W of each token, or kNoWeight if the token is masked
  std::int64_t* counts;  // [num_sequences]: number of unmasked tokens
  std::int64_t bytes;

  BaselineWorkspace(const Sequences& q, void* memory) {
    const std::int64_t first = (q.num_slots() * 4 + 15) / 16 * 16;
    bytes = first + q.num_sequences * 8;
    weights = static_cast<float*>(memory);
    counts = memory == nullptr ? nullptr : reinterpret_cast<std::int64_t*>(static_cast<unsigned char*>(memory) + first);
  }
};

// Blocks per group: one for each chunk of a sequence of mean length, up to a bound. Block `part` processes every chunk
// whose index is `part` plus a multiple of the number of blocks.
inline std::int64_t baseline_blocks_of_group(const Sequences& q) {
  constexpr std::int64_t kMost = 64;
  const std::int64_t tiles = (mean_length(q) + kBaselineChunk - 1) / kBaselineChunk;
  return tiles < 1 ? 1 : tiles < kMost ? tiles : kMost;
}

struct BaselineShared {
  float weight[kBaselineChunk], reward[kBaselineChunk];
  float last_weight, first_reward;
  std::uint32_t counts[kBaselineChunk / 32];
};

// Index of a sequence's first token in the outputs and in the workspace.
RLK_HD std::int64_t output_offset(const Sequences& q, std::int64_t s, const TokenSpan& span) {
  return q.packed() ? span.begin : s * q.num_tokens;
}

template <class Gpu>
RLK_DEVICE void baseline_scan(const OptimalTokenBaselineParams& p, const BaselineWorkspace& w, std::int64_t s,
                              BaselineShared* shared) {
  const Sequences& q = p.sequences;
  if (s >= q.num_sequences) {
    for (float* const array : {p.returns, p.advantages}) {
      clear_rest(q, array, s - q.num_sequences, rest_blocks(q), Gpu::thread(), kBaselineChunk);
    }
    return;
  }
  const TokenSpan span = span_of(q, s);
  const int thread = Gpu::thread();
  const bool shares_reward = p.rewards.token_stride == 0;
  const std::int64_t to = output_offset(q, s, span), mask_at = q.packed() ? span.begin : s * p.mask.row_stride;
  const auto counted = [&](std::int64_t t) { return t < span.length && counts<GlobalMemory>(p.mask, mask_at + t); };
  // If an array is null, this computes an address that is never read.
  const auto of_sequence = [&](const PolicyTokens& a) { return in_global(a.data) + offset_of(a, q, s, span); };
  const float* const rewards = of_sequence(p.rewards);
  const float* const logprob = of_sequence(p.logprob);
  const float* const sum_p_sq = of_sequence(p.sum_p_sq);
  const float* const importance = of_sequence(p.importance);
  float* const weights = in_global(w.weights) + to;
  float* const returns = in_global(p.returns) + to;
  const std::int64_t chunks = (span.length + kBaselineChunk - 1) / kBaselineChunk;
  // G is NaN if the sequence's offsets are bad.
  float before = 0.0f, after = has_bad_offsets(q, s) ? canonical_nan() : 0.0f;
  std::uint32_t tokens = 0;
  RLK_UNROLL_NOT
  for (std::int64_t k = 0; k < chunks; ++k) {
    const std::int64_t t = k * kBaselineChunk + thread, u = (chunks - 1 - k) * kBaselineChunk + thread;
    const bool of_weight = counted(t), of_reward = counted(u);
    float x = 0.0f, y = 0.0f;
    if (of_weight) {
      x = baseline_weight(logprob[t], sum_p_sq[t]);
      if (p.importance.data != nullptr) x = weighted_by(x, importance[t * p.importance.token_stride]);
    }
    if (of_reward && !shares_reward) y = rewards[u];
    tokens += of_weight ? 1 : 0;
    RLK_UNROLL_NOT
    for (int h = 1; h < kBaselineChunk; h *= 2) {
      shared->weight[thread] = x;
      shared->reward[thread] = y;
      Gpu::barrier();
      x = add_rn(x, thread >= h ? shared->weight[thread - h] : 0.0f);
      y = add_rn(y, thread + h < kBaselineChunk ? shared->reward[thread + h] : 0.0f);
      Gpu::barrier();
    }
    if (thread == kBaselineChunk - 1) shared->last_weight = x;
    if (thread == 0) shared->first_reward = y;
    Gpu::barrier();
    if (t < span.length) weights[t] = of_weight ? add_rn(before, x) : kNoWeight;
    if (u < span.length) {
      const float g = add_rn(after, shares_reward ? rewards[0] : y);
      returns[u] = of_reward ? finite_or_canonical(g) : 0.0f;
    }
    before = add_rn(before, shared->last_weight);
    after = add_rn(after, shared->first_reward);
  }
  const std::uint32_t of_wave = Gpu::sum_over_wave(tokens);
  if (thread % Gpu::kLanes == 0) shared->counts[thread / Gpu::kLanes] = of_wave;
  Gpu::barrier();
  if (thread != 0) return;
  std::int64_t total = 0;
  for (int i = 0; i < kBaselineChunk / Gpu::kLanes; ++i) total += shared->counts[i];
  in_global(w.counts)[s] = total;
}

// Computes advantages at the positions of a group that belong to part `part` out of `parts` parts.
template <class Gpu>
RLK_DEVICE void baseline_group(const OptimalTokenBaselineParams& p, const BaselineWorkspace& w, std::int64_t group,
                               std::int64_t part, std::int64_t parts) {
  const Sequences& q = p.sequences;
  const OffsetRange range = group_of(p, group);
  const float* const weights = in_global(w.weights);
  const float* const returns = in_global(p.returns);
  float* const advantages = in_global(p.advantages);
  const std::int64_t* const tokens = in_global(w.counts);
  BaselineTail tail;
  std::int64_t longest = 0;
  RLK_UNROLL_NOT
  for (std::int64_t s = range.begin; s < range.end; ++s) {
    const std::int64_t length = span_of(q, s).length;
    longest = length > longest ? length : longest;
    if (p.zero_tail != 0) tail.add(s, tokens[s]);
  }
  RLK_UNROLL_NOT
  for (std::int64_t first = part * kBaselineChunk; first < longest; first += parts * kBaselineChunk) {
    const std::int64_t t = first + Gpu::thread();
    float num = 0.0f, den = 0.0f;
    RLK_UNROLL_NOT
    for (std::int64_t s = range.begin; s < range.end; ++s) {
      const TokenSpan span = span_of(q, s);
      if (t >= span.length) continue;
      const std::int64_t at = output_offset(q, s, span) + t;
      const float weight = weights[at], g = returns[at];
      if (weight < 0.0f) continue;
      num = fma_rn(g, weight, num);
      den = add_rn(den, weight);
    }
    const float baseline = range.end - range.begin == 1 ? 0.0f : div_rn(num, add_rn(den, p.eps));
    RLK_UNROLL_NOT
    for (std::int64_t s = range.begin; s < range.end; ++s) {
      const TokenSpan span = span_of(q, s);
      if (t >= span.length) continue;
      const std::int64_t at = output_offset(q, s, span) + t;
      const float x = sub_rn(returns[at], tail.has(s, t) ? 0.0f : baseline);
      advantages[at] = weights[at] < 0.0f ? 0.0f : finite_or_canonical(x);
    }
  }
}

}  // namespace rlk
