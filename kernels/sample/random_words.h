// The words of random_bits that one thread writes, shared by every backend, and the preconditions of a call.
#pragma once

#include "rlk/math/philox.h"
#include "rlk/ops/random_bits.h"

namespace rlk {

// Number of blocks of four words in a row.
RLK_HD std::int64_t random_blocks(const RandomBitsParams& p) { return (p.num_words + 3) / 4; }

// Writes the four words of block `block` in row `row`.
RLK_HD void write_random_block(const RandomBitsParams& p, std::int64_t row, std::int32_t block) {
  const std::int64_t position = p.position.at(row);
  const bool valid = position >= 0 && position < kPositions;
  const PhiloxBlock words = philox_block(
      static_cast<std::uint64_t>(p.seed.at(row)), static_cast<std::uint64_t>(p.sample_id.at(row)),
      static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(kStreamBlocks * p.random_stream + block));
  std::int64_t* const to = p.bits + row * p.num_words + 4 * block;
  const std::int32_t left = p.num_words - 4 * block;
  to[0] = valid ? std::int64_t{words.x} : -1;
  if (left > 1) to[1] = valid ? std::int64_t{words.y} : -1;
  if (left > 2) to[2] = valid ? std::int64_t{words.z} : -1;
  if (left > 3) to[3] = valid ? std::int64_t{words.w} : -1;
}

inline void check_random_bits(const RandomBitsParams& p) {
  RLK_CHECK(p.num_rows >= 0 && p.num_rows < std::int64_t{1} << 32, "random_bits: fewer than 2^32 rows");
  RLK_CHECK(p.num_words >= 1 && p.num_words <= kStreamWords, "random_bits: 1 to 1024 words");
  RLK_CHECK(p.random_stream >= 0 && p.random_stream < kRandomStreams, "random_bits: the stream is in [0, 2^24)");
  RLK_CHECK(p.bits != nullptr || p.num_rows == 0, "random_bits: bits are given");
}

}  // namespace rlk
