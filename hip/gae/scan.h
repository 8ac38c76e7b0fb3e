// gae, discounted_returns and vtrace. A block scans one sequence from its end. Each team of 32 lanes processes a chunk
// of 128 tokens at a time. A chunk needs two numbers from the chunks after it: the scan's state x, and the value
// estimate of their first unmasked token. Teams exchange both numbers through LDS.
#pragma once

#include "hip/common/half_wave.h"
#include "hip/gae/launches.h"
#include "hip/tokens/vec4_access.h"
#include "kernels/advantages/gae_scan.h"

namespace rlk::hip {

template <GaeKind kKind>
RLK_DEVICE bool has_vectors(const GaeParams& p, const TokenSpan& span) {
  std::uintptr_t bits = 0;
  const auto add = [&](const float* data, std::int64_t row_stride) {
    bits |= reinterpret_cast<std::uintptr_t>(data + span.offset(row_stride));
  };
  add(p.rewards.data, p.rewards.row_stride);
  add(p.returns.data, p.returns.row_stride);
  if constexpr (kKind != GaeKind::kDiscountedReturns) {
    add(p.values.data, p.values.row_stride);
    add(p.advantages.data, p.advantages.row_stride);
  }
  if constexpr (kKind == GaeKind::kVtrace) {
    add(p.logprob.data, p.logprob.row_stride);
    add(p.rollout_logprob.data, p.rollout_logprob.row_stride);
  }
  return bits % 16 == 0;
}

template <GaeKind kKind>
RLK_DEVICE void gae_kernel(const GaeParams& p, std::int64_t first_block) {
  constexpr bool kHasValues = kKind != GaeKind::kDiscountedReturns;
  struct Shared {
    ScanStep totals[2][kGaeTeams];
    float first_values[kGaeTeams];
    int any_counts[kGaeTeams];
  };
  static_assert(sizeof(Shared) == kGaeLdsBytes);
  Shared& shared = *reinterpret_cast<Shared*>(lds());

  const int lane = team_lane(), team = team_id();
  const std::int64_t sequence = first_block + block_id_x();
  Sequences sequences = p.sequences;
  sequences.cu_seqlens = global_pointer(sequences.cu_seqlens);
  if (clears_or_spoils(p, sequence, static_cast<int>(thread_id()), kGaeThreads)) return;
  const TokenSpan span = span_of(sequences, sequence);
  const GaeConstants constants(p);
  const bool vectors = has_vectors<kKind>(p, span), reset = kKind == GaeKind::kDiscountedReturns && p.reset;
  const std::int64_t chunks = (span.length + kScanChunk - 1) / kScanChunk;

  float next_behind = kHasValues && p.bootstrap != nullptr ? global_pointer(p.bootstrap)[sequence] : 0.0f;
  float x_behind = 0.0f;
  std::int64_t chunk = chunks - kGaeTeams + team;  // the team's chunk; negative if no chunk is left for the team
  for (std::int64_t tiles = (chunks + kGaeTeams - 1) / kGaeTeams; tiles > 0; --tiles, chunk -= kGaeTeams) {
    const std::int64_t first_token = chunk * kScanChunk + lane * kLaneTokens, left = span.length - first_token;
    const int count = chunk < 0 || left <= 0 ? 0 : left < kLaneTokens ? static_cast<int>(left) : kLaneTokens;
    FourTokens reward = {}, value = {}, logprob = {}, rollout_logprob = {};
    unsigned counted = 0;
    if (count > 0) {
      const auto read = [&](const TokenArray<const float>& a) {
        return load_tokens(a.data + span.offset(a.row_stride) + first_token, count, vectors);
      };
      reward = read(p.rewards);
      if constexpr (kHasValues) value = read(p.values);
      if constexpr (kKind == GaeKind::kVtrace) {
        logprob = read(p.logprob);
        rollout_logprob = read(p.rollout_logprob);
      }
      counted = load_mask(p.mask, span.offset(p.mask.row_stride) + first_token, count);
    }

    float next = next_behind;  // value after the lane's last token
    if constexpr (kHasValues) {
      const std::uint32_t lanes = ballot_team(counted != 0);
      float first = 0.0f;
#pragma unroll
      for (int j = kLaneTokens - 1; j >= 0; --j) {
        if (counted >> j & 1) first = value.v[j];
      }
      const float first_of_team = shuffle_team(first, lanes == 0 ? 0 : __builtin_ctz(lanes));
      if (lane == 0) {
        shared.first_values[team] = first_of_team;
        shared.any_counts[team] = lanes != 0;
      }
      block_barrier();
#pragma unroll 1
      for (int t = kGaeTeams - 1; t >= 0; --t) {
        if (t == team) next = next_behind;
        if (shared.any_counts[t]) next_behind = shared.first_values[t];
      }
      const std::uint32_t later = lane == kTeam - 1 ? 0 : lanes >> (lane + 1);
      const float found = shuffle_team(first, later == 0 ? lane : lane + 1 + __builtin_ctz(later));
      if (later != 0) next = found;
    }

    ScanStep steps[kLaneTokens], block = {1.0f, 0.0f};
    float nexts[kLaneTokens], rho[kLaneTokens];
#pragma unroll
    for (int j = kLaneTokens - 1; j >= 0; --j) {
      nexts[j] = next;
      rho[j] = 0.0f;
      if (counted >> j & 1) {
        const float log_ratio =
            kKind == GaeKind::kVtrace ? vtrace_log_ratio(p.rollout_neutral, logprob.v[j], rollout_logprob.v[j]) : 0.0f;
        steps[j] = gae_step<kKind>(constants, reward.v[j], value.v[j], next, log_ratio, &rho[j]);
        block = scan_compose(steps[j], block);
        if constexpr (kHasValues) next = value.v[j];
      } else {
        steps[j] = {reset ? 0.0f : 1.0f, 0.0f};
        if (reset) block = {0.0f, 0.0f};
      }
    }
#pragma unroll
    for (int h = 1; h < kScanLanes; h *= 2) {
      const int from = lane + h < kScanLanes ? lane + h : lane;
      const ScanStep other = {shuffle_team(block.c, from), shuffle_team(block.d, from)};
      if (lane + h < kScanLanes) block = scan_compose(block, other);
    }

    float x = x_behind;  // the scan's state, from the chunks after this chunk
    if (lane == 0) shared.totals[tiles & 1][team] = block;
    block_barrier();
#pragma unroll 1
    for (int t = kGaeTeams - 1; t >= 0; --t) {
      if (t == team) x = x_behind;
      x_behind = scan_advance(shared.totals[tiles & 1][t], x_behind);
    }
    const int from = lane < kTeam - 1 ? lane + 1 : lane;
    const ScanStep behind = {shuffle_team(block.c, from), shuffle_team(block.d, from)};
    if (lane < kTeam - 1) x = scan_advance(behind, x);

    FourTokens advantages = {}, returns = {};
#pragma unroll
    for (int j = kLaneTokens - 1; j >= 0; --j) {
      const bool is_counted = counted >> j & 1;
      const float after = x;
      if (is_counted || reset) x = scan_advance(steps[j], x);
      if constexpr (kHasValues) {
        returns.v[j] = canonical(add_rn(x, is_counted ? value.v[j] : nexts[j]));
        advantages.v[j] = canonical(x);
        if constexpr (kKind == GaeKind::kVtrace) {
          const float of_policy = vtrace_advantage(constants, reward.v[j], value.v[j], nexts[j], after, rho[j]);
          advantages.v[j] = is_counted ? canonical(of_policy) : 0.0f;
        }
      } else {
        returns.v[j] = canonical(x);
      }
    }
    if (count > 0) {
      store_tokens(p.returns.data + span.offset(p.returns.row_stride) + first_token, count, vectors, returns);
      if constexpr (kHasValues) {
        store_tokens(p.advantages.data + span.offset(p.advantages.row_stride) + first_token, count, vectors,
                     advantages);
      }
    }
  }
}

}  // namespace rlk::hip
