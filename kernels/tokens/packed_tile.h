// Finds the sequences of consecutive packed tokens on a GPU. First the threads of a block search together for the
// sequences of the block's first and last token. Each token's search is then limited to the range between these two
// sequences. If sequences are long, both tokens often lie in the same sequence.
#pragma once

#include <cstdint>

#include "rlk/tokens.h"

namespace rlk {

constexpr int kTileThreads = 256;
constexpr int kTileTokens = 8;  // tokens per thread, at a stride of kTileThreads
constexpr int kTokenTile = kTileThreads * kTileTokens;

inline std::int64_t tiles_of(std::int64_t num_tokens) { return (num_tokens + kTokenTile - 1) / kTokenTile; }

// The range of sequences that contain the tokens from `first` to `last`, if offsets ascend. `shared` is an array of two
// numbers in shared memory. One half of the threads searches for `first`, the other half for `last`. Each step cuts the
// range that remains into equal parts, and each thread tests one part. At least one part passes its test, whatever the
// offsets are.
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

// Finds each token's sequence in the range. The result is -1 if that sequence has bad offsets or does not contain the
// token. All threads search in lockstep.
template <class Memory>
RLK_HD void sequences_of(const Offsets& o, const SequenceRange& range, std::int64_t num_tokens,
                         const std::int64_t (&tokens)[kTileTokens], std::int64_t (&begin)[kTileTokens],
                         std::int64_t (&length)[kTileTokens], std::int32_t (&sequence)[kTileTokens]) {
  const auto search = [&](const auto* offsets) {
    const auto* at = Memory::global(offsets);
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) sequence[k] = static_cast<std::int32_t>(range.low);
    RLK_UNROLL_NOT
    for (auto left = static_cast<std::int32_t>(range.high - range.low); left > 1; left -= left / 2) {
      RLK_UNROLL
      for (int k = 0; k < kTileTokens; ++k) {
        sequence[k] += at[sequence[k] + left / 2] <= tokens[k] ? left / 2 : 0;
      }
    }
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) {
      const bool any = range.high > range.low;
      begin[k] = any ? std::int64_t{at[sequence[k]]} : 0;
      const std::int64_t end = any ? std::int64_t{at[sequence[k] + 1]} : 0;
      length[k] = end - begin[k];
      const bool good = begin[k] >= 0 && begin[k] <= end && end <= num_tokens && (sequence[k] != 0 || begin[k] == 0);
      if (!good || tokens[k] < begin[k] || tokens[k] >= end) sequence[k] = -1;
    }
  };
  if (o.dtype == DType::kInt64) {
    search(static_cast<const std::int64_t*>(o.data));
  } else {
    search(static_cast<const std::int32_t*>(o.data));
  }
}

}  // namespace rlk
