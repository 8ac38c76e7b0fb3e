// THE CONTRACT of `random_bits`: the random words of one token. rk.sample draws from the same words, so a draw can be
// replayed. All arithmetic is on integers, so every backend has the same bytes.
//
//   bits[i, w] = word w % 4 of philox4x32-10(key, counter_w)              rlk/math/philox.h
//   key        = (seed[i] low, seed[i] high)                              32-bit halves of the 64 bits
//   counter_w  = (sample_id[i] low, sample_id[i] high, position[i], 256 * stream + w / 4)
// `sample_id` names a rollout, not a slot of the batch. `position` is the token's index in the sample's output, not a
// step of the engine. So a row's words depend on no other row, no batch size and no order of rows. rk.sample uses
// stream 0; rejection in rk.verify_draft uses stream 1.
// A row whose position lies outside [0, 2^32) has -1 in every word.
// The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

// One integer for each row, or a single integer for all rows.
struct RowIntegers {
  const void* data = nullptr;  // [num_rows], dtype, or null: `value` for every row
  std::int64_t value = 0;
  std::int64_t stride = 0;      // elements between rows of `data`
  DType dtype = DType::kInt64;  // kInt32, kInt64

  // The row's integer. Code for a GPU passes a `Memory` that reads global memory (rlk/tokens.h).
  template <class Memory = PlainMemory>
  RLK_HD std::int64_t at(std::int64_t row) const {
    if (data == nullptr) return value;
    if (dtype == DType::kInt64) return Memory::global(static_cast<const std::int64_t*>(data))[row * stride];
    return Memory::global(static_cast<const std::int32_t*>(data))[row * stride];
  }
};

constexpr std::int32_t kStreamBlocks = 256;                 // blocks per stream, four words each
constexpr std::int32_t kStreamWords = 4 * kStreamBlocks;    // words per token in one stream
constexpr std::int32_t kRandomStreams = 1 << 24;            // streams per token
constexpr std::int64_t kPositions = std::int64_t{1} << 32;  // positions per sample

struct RandomBitsParams {
  RowIntegers seed;       // all 64 bits are used, the sign bit included
  RowIntegers sample_id;  // all 64 bits are used, the sign bit included
  RowIntegers position;
  std::int64_t* bits = nullptr;  // [num_rows, num_words], contiguous; values in [0, 2^32), or -1
  std::int64_t num_rows = 0;
  std::int32_t num_words = 0;      // in [1, kStreamWords]
  std::int32_t random_stream = 0;  // in [0, kRandomStreams)
};

void random_bits(const RandomBitsParams& p, Device device, Stream stream);

}  // namespace rlk
