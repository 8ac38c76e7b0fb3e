// The sequences of packed tokens that follow one another, for GPUs: a block searches together for those of its first and of
// its last token; each token then searches between these alone, which for long sequences is no search.
#pragma once

#include <cstdint>

#include "rlk/kernels/sequences.h"

namespace rlk {

constexpr int kTileThreads = 256;
constexpr int kTileTokens = 8;  // of a thread, kTileThreads apart
constexpr int kTokenTile = kTileThreads * kTileTokens;

inline std::int64_t tiles_of(std::int64_t num_tokens) { return (num_tokens + kTokenTile - 1) / kTokenTile; }

// That all tokens in [first, last] are of, where offsets ascend. `shared`: [2] that the block shares. Half of the threads look
// for either end, at places that cut what is left in equal parts: of these one at least is right, whatever the offsets are.
template <class Memory, class Barrier>
RLK_HD SequenceRange range_of_tile(const Offsets& o, std::int64_t num_sequences, std::int64_t first, std::int64_t last,
                                   int thread, std::int64_t* shared, const Barrier& barrier) {
  if (num_sequences <= 1) return {0, num_sequences};
  constexpr int kParts = kTileThreads / 2;
  const int end = thread / kParts, part = thread % kParts;
  const std::int64_t token = end == 0 ? first : last;
  std::int64_t low = 0, left = num_sequences;
  while (left > 1) {
    const std::int64_t step = (left + kParts - 1) / kParts, from = low + part * step, to = from + step;
    const std::int64_t stop = low + left < num_sequences ? low + left : num_sequences;
    if (from < stop && (part == 0 || offset_at<Memory>(o, from) <= token) &&
        (to >= stop || offset_at<Memory>(o, to) > token)) {
      shared[end] = from;
    }
    barrier();
    low = shared[end];
    left = step;
    if (left <= 1) break;
    barrier();
  }
  const std::int64_t found = shared[0], after = shared[1] + 1;
  return {found, after > found ? after : found + 1};
}

// Whether a tile's tokens and offsets are searched as 32-bit numbers.
RLK_HD bool tile_is_narrow(const Offsets& o, std::int64_t last) {
  return o.dtype == DType::kInt32 && last < 0x7fffffff - kTokenTile;
}

// Of each of these tokens the sequence in the range and its offsets; -1 where it is no good one or has not the token. All
// search in step.
template <class Memory, class Index>
RLK_HD void sequences_of(const Offsets& o, const SequenceRange& range, std::int64_t num_tokens,
                         const Index (&tokens)[kTileTokens], Index (&begin)[kTileTokens], Index (&end)[kTileTokens],
                         std::int32_t (&sequence)[kTileTokens]) {
  const auto at = [&](std::int32_t i) -> Index {
    if constexpr (sizeof(Index) == 4) {
      return Memory::global(static_cast<const Index*>(o.data))[i];
    } else {
      return offset_at<Memory>(o, i);
    }
  };
  const auto low = static_cast<std::int32_t>(range.low), num = static_cast<std::int32_t>(range.high - range.low);
  RLK_UNROLL
  for (int k = 0; k < kTileTokens; ++k) sequence[k] = low;
  RLK_UNROLL_NOT
  for (std::int32_t left = num; left > 1; left -= left / 2) {
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) sequence[k] += at(sequence[k] + left / 2) <= tokens[k] ? left / 2 : 0;
  }
  RLK_UNROLL
  for (int k = 0; k < kTileTokens; ++k) {
    begin[k] = num > 0 ? at(sequence[k]) : 0;
    end[k] = num > 0 ? at(sequence[k] + 1) : 0;
  }
  RLK_UNROLL
  for (int k = 0; k < kTileTokens; ++k) {
    const bool good = begin[k] >= 0 && end[k] <= num_tokens && (sequence[k] != 0 || begin[k] == 0);
    if (!good || tokens[k] < begin[k] || tokens[k] >= end[k]) sequence[k] = -1;  // then begin <= end, too
  }
}

}  // namespace rlk
