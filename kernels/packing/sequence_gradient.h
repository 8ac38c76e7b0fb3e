// The gradient of sequence_logprob, split over a GPU's threads, for CUDA and HIP. Each token's gradient is computed
// independently. A RowSplit splits padded rows. A packed array is cut into the tiles of kernels/tokens/packed_tile.h.
#pragma once

#include "kernels/rows/row_split.h"
#include "kernels/tokens/packed_tile.h"
#include "rlk/ops/sequence_logprob.h"

namespace rlk {

constexpr int kGradientLog2Threads = 8;
constexpr int kGradientThreads = 1 << kGradientLog2Threads;
static_assert(kGradientThreads == kTileThreads);

struct GradientGrid {
  RowSplit split;  // split of padded rows
  std::int64_t blocks;
};
inline GradientGrid gradient_grid(const SequenceLogprobBackwardParams& p) {
  GradientGrid g;
  if (p.cu_seqlens.data != nullptr) {
    g.blocks = tiles_of(p.num_tokens);
    return g;
  }
  RLK_CHECK(p.num_tokens < std::int64_t{1} << 30, "sequence_logprob: fewer than 2^30 tokens in a row");
  g.split = split_rows(p.num_tokens, kTileTokens, kGradientLog2Threads);
  g.blocks = blocks_of(g.split, p.num_sequences);
  return g;
}

// Calls f(index, value) for each token of a thread: the token's index in d_logprob, and its gradient. `shared` is an
// array of two numbers in shared memory.
template <class Memory, class Barrier, class F>
RLK_HD void sequence_gradient(const SequenceLogprobBackwardParams& p, const GradientGrid& g, std::int64_t block,
                              int thread, std::int64_t* shared, const Barrier& barrier, const F& f) {
  const float* dsum = Memory::global(p.dsum);
  if (p.cu_seqlens.data == nullptr) {
    const RowPlace at = place_in_rows(g.split, kTileTokens, static_cast<std::uint32_t>(block), thread);
    if (at.row >= p.num_sequences) return;
    const float gradient = dsum[at.row * p.dsum_stride];
    const auto columns = static_cast<int>(p.num_tokens);
    with_flag_bytes(p.mask, [&](auto bytes) {
      const FlagsFrom<decltype(bytes)::value, Memory> flags(p.mask, at.row * p.mask.row_stride + at.first);
      typename decltype(flags)::Flag flag[kTileTokens];
      RLK_UNROLL
      for (int k = 0; k < kTileTokens; ++k) {
        flag[k] = 0;
        if (at.first + k * at.step < columns) flag[k] = flags.load(k * at.step);
      }
      RLK_UNROLL
      for (int k = 0; k < kTileTokens; ++k) {
        const int t = at.first + k * at.step;
        if (t < columns) f(at.row * p.num_tokens + t, flags.counts(flag[k]) ? gradient : 0.0f);
      }
    });
    return;
  }
  const std::int64_t first = block * kTokenTile;
  const std::int64_t left = p.num_tokens - first, last = first + (left < kTokenTile ? left : kTokenTile) - 1;
  const SequenceRange range =
      range_of_tile<Memory>(p.cu_seqlens, p.num_sequences, first, last, thread, shared, barrier);
  std::int64_t tokens[kTileTokens], begin[kTileTokens], length[kTileTokens];
  std::int32_t sequence[kTileTokens];
  RLK_UNROLL
  for (int k = 0; k < kTileTokens; ++k) tokens[k] = first + k * kTileThreads + thread;
  sequences_of<Memory>(p.cu_seqlens, range, p.num_tokens, tokens, begin, length, sequence);
  float gradient[kTileTokens];
  RLK_UNROLL
  for (int k = 0; k < kTileTokens; ++k) {
    gradient[k] = 0.0f;
    if (sequence[k] >= 0) gradient[k] = dsum[sequence[k] * p.dsum_stride];
  }
  with_flag_bytes(p.mask, [&](auto bytes) {
    const FlagsFrom<decltype(bytes)::value, Memory> flags(p.mask, tokens[0]);
    typename decltype(flags)::Flag flag[kTileTokens];
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) {
      flag[k] = 0;
      if (tokens[k] <= last) flag[k] = flags.load(k * kTileThreads);
    }
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) {
      if (tokens[k] <= last) f(tokens[k], flags.counts(flag[k]) ? gradient[k] : 0.0f);
    }
  });
}

}  // namespace rlk
