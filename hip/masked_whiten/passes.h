// masked_whiten in five launches. The launches compute the sum of each sequence, the mean, the sum of squares of each
// sequence, the variance, and the whitened tokens. Each block sums one sequence. Each team of 32 lanes processes a
// chunk of 128 tokens at a time, with four tokens per lane.
#pragma once

#include "hip/common/half_wave.h"
#include "hip/masked_whiten/launches.h"
#include "hip/tokens/vec4_access.h"
#include "kernels/tokens/slots.h"
#include "kernels/tokens/team_sum.h"

namespace rlk::hip {

struct WhitenTeam {
  RLK_DEVICE int lane() const { return team_lane(); }
  RLK_DEVICE bool writes() const { return true; }
  template <class T>
  RLK_DEVICE T shuffle_xor(T value, int mask) const {
    return rlk::hip::shuffle_xor(value, mask);
  }
};

// The count, minimum and maximum of a lane's tokens, and later of a block's tokens.
struct WhitenCounts {
  std::int64_t n = 0;
  float least = infinity(), largest = -infinity();

  RLK_DEVICE void add(const WhitenCounts& o) {
    n += o.n;
    least = o.least < least ? o.least : least;
    largest = o.largest > largest ? o.largest : largest;
  }
};
static_assert(sizeof(WhitenCounts) * kWhitenThreads <= kWhitenLdsBytes);

struct WhitenBlock {
  WhitenTeam of_lanes;
  RLK_DEVICE const WhitenTeam& team() const { return of_lanes; }
  RLK_DEVICE int number() const { return team_id(); }
  RLK_DEVICE int teams() const { return kWhitenTeams; }
  RLK_DEVICE void barrier() const { block_barrier(); }
  RLK_DEVICE float* sums() const { return reinterpret_cast<float*>(lds()); }
};

// Adds the counts of all lanes. The function overwrites LDS, and its barriers protect earlier and later uses of LDS.
RLK_DEVICE WhitenCounts counts_of_block(const WhitenCounts& of_lane) {
  auto* counts = reinterpret_cast<WhitenCounts*>(lds());
  block_barrier();
  counts[thread_id()] = of_lane;
  block_barrier();
  WhitenCounts all;
  if (thread_id() == 0) {
#pragma unroll 1
    for (int i = 0; i < kWhitenThreads; ++i) all.add(counts[i]);
  }
  block_barrier();
  return all;
}

RLK_DEVICE MaskedWhitenParams in_global_memory(MaskedWhitenParams p) {
  p.sequences.cu_seqlens = global_pointer(p.sequences.cu_seqlens);
  p.mean = global_pointer(p.mean);
  p.var = global_pointer(p.var);
  p.workspace = global_pointer(p.workspace);
  return p;
}

RLK_DEVICE bool has_vectors(const MaskedWhitenParams& p, const TokenSpan& span) {
  const auto at = [&](const float* data, std::int64_t row_stride) {
    return reinterpret_cast<std::uintptr_t>(data + span.offset(row_stride));
  };
  return (at(p.x.data, p.x.row_stride) | at(p.y.data, p.y.row_stride)) % 16 == 0;
}

// The tokens of a lane in its team's chunk, and one bit per token, which is set if the token is unmasked.
struct WhitenLane {
  FourTokens x = {};
  unsigned counted = 0;
  int count;

  RLK_DEVICE WhitenLane(const MaskedWhitenParams& p, const TokenSpan& span, std::int64_t first, bool vectors) {
    const std::int64_t left = span.length - first;
    count = left <= 0 ? 0 : left < kLaneTokens ? static_cast<int>(left) : kLaneTokens;
    if (count == 0) return;
    x = load_tokens(p.x.data + span.offset(p.x.row_stride) + first, count, vectors);
    counted = load_mask(p.mask, span.offset(p.mask.row_stride) + first, count);
  }
};

template <bool kSquares>
RLK_DEVICE void whiten_sums_kernel(const MaskedWhitenParams& given, std::int64_t first_block) {
  const MaskedWhitenParams p = in_global_memory(given);
  const std::int64_t sequence = first_block + block_id_x();
  const TokenSpan span = span_of(p.sequences, sequence);
  const bool vectors = has_vectors(p, span);
  const WhitenMemory memory(p);
  WhitenStatistics statistics;
  if constexpr (kSquares) statistics = *memory.statistics;
  const WhitenBlock block;
  WhitenCounts counts;
  TeamSumTree<WhitenTeam> tree{block.team()};
#pragma unroll 1
  for (std::int64_t first = 0; first < span.length; first += kWhitenTeams * kTeamChunk) {
    const WhitenLane tokens(p, span, first + thread_id() * kLaneTokens, vectors);
    float v[kLaneTokens];
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      v[j] = 0.0f;
      if (!(tokens.counted >> j & 1)) continue;
      const float x = tokens.x.v[j];
      if constexpr (kSquares) {
        v[j] = whiten_square(statistics, x);
      } else {
        v[j] = x;
        WhitenCounts one;
        one.n = 1;
        if (!is_nan(x)) one.least = one.largest = x;
        counts.add(one);
      }
    }
    const float sum = tree_of_chunk(block.team(), v);
    block_barrier();
    if (team_lane() == 0) block.sums()[team_id()] = sum;
    block_barrier();
    const float of_team = team_lane() < kWhitenTeams ? block.sums()[team_lane()] : 0.0f;
    tree.take(sum_over_lanes<kWhitenTeams>(block.team(), of_team));
  }
  // Bad offsets make the sum NaN. The mean and all tokens then become NaN, too.
  const float total = has_bad_offsets(p.sequences, sequence) ? canonical_nan() : finished_sum(tree.finish());
  if constexpr (!kSquares) {
    const WhitenCounts all = counts_of_block(counts);
    if (thread_id() == 0) {
      memory.counts[sequence] = all.n;
      memory.least[sequence] = all.least;
      memory.largest[sequence] = all.largest;
    }
  }
  if (thread_id() == 0) memory.sums[sequence] = total;
}

template <bool kSquares>
RLK_DEVICE void whiten_batch_kernel(const MaskedWhitenParams& given, std::int64_t) {
  const MaskedWhitenParams p = in_global_memory(given);
  const WhitenMemory memory(p);
  const std::int64_t num = p.sequences.num_tokens == 0 ? 0 : p.sequences.num_sequences;
  const float total = sum_of_block(WhitenBlock(), num, [&](std::int64_t s) { return memory.sums[s]; });
  if constexpr (kSquares) {
    if (thread_id() != 0) return;
    WhitenStatistics statistics = *memory.statistics;
    whiten_variance(p, total, &statistics);
    *memory.statistics = statistics;
  } else {
    WhitenCounts counts;
    for (std::int64_t s = thread_id(); s < num; s += kWhitenThreads) {
      WhitenCounts one;
      one.n = memory.counts[s];
      one.least = memory.least[s];
      one.largest = memory.largest[s];
      counts.add(one);
    }
    const WhitenCounts all = counts_of_block(counts);
    if (thread_id() == 0) *memory.statistics = whiten_mean(all.n, total, all.least, all.largest);
  }
}

RLK_DEVICE void whiten_tokens_kernel(const MaskedWhitenParams& given, std::int64_t first_block) {
  const MaskedWhitenParams p = in_global_memory(given);
  if (const std::int64_t rest = first_block + block_id_x() - p.sequences.num_sequences; rest >= 0) {
    return clear_rest(p.sequences, p.y.data, rest, rest_blocks(p.sequences), static_cast<int>(thread_id()),
                      kWhitenThreads);
  }
  const TokenSpan span = span_of(p.sequences, first_block + block_id_x());
  const bool vectors = has_vectors(p, span);
  const WhitenStatistics statistics = *WhitenMemory(p).statistics;
#pragma unroll 1
  for (std::int64_t first = thread_id() * kLaneTokens; first < span.length; first += kWhitenThreads * kLaneTokens) {
    const WhitenLane tokens(p, span, first, vectors);
    FourTokens y;
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      y.v[j] = tokens.counted >> j & 1 ? whiten_token(p, statistics, tokens.x.v[j]) : 0.0f;
    }
    store_tokens(p.y.data + span.offset(p.y.row_stride) + first, tokens.count, vectors, y);
  }
}

}  // namespace rlk::hip
