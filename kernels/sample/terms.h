// The integer formulas of sample: ranks, masses, thresholds, and the comparison that a draw makes at a node.
#pragma once

#include "rlk/math/ieee.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/sample.h"

namespace rlk {

// A column's rank is a number of 51 bits. Ranks ascend as z descends; among columns of equal z, they ascend with the
// id. A rank has five digits. From the top, they hold 11, 11 and 10 bits of z, and then 10 and 9 bits of the id.
constexpr int kIdBits = 19;
constexpr int kRankDigits = 5;
constexpr int kDigitBins = 2048;
constexpr std::uint64_t kLastRank = ~std::uint64_t{0};
RLK_HD int digit_shift(int digit) { return digit == 0 ? 40 : digit == 1 ? 29 : digit == 2 ? 19 : digit == 3 ? 9 : 0; }
RLK_HD int digit_bits(int digit) { return digit < 2 ? 11 : digit < 4 ? 10 : 9; }

RLK_HD std::uint64_t rank_of(float z, std::int64_t id) {
  const auto bits = static_cast<std::uint32_t>(bits_of(add_rn(z, 0.0f)));  // + 0 turns -0 into +0
  const std::uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{~ascending} << kIdBits | static_cast<std::uint64_t>(id);
}
RLK_HD std::int64_t id_of_rank(std::uint64_t rank) {
  return static_cast<std::int64_t>(rank & ((std::uint64_t{1} << kIdBits) - 1));
}
RLK_HD float z_of_rank(std::uint64_t rank) {
  const std::uint32_t ascending = ~static_cast<std::uint32_t>(rank >> kIdBits);
  return float_of(static_cast<std::int32_t>(ascending >> 31 ? ascending & 0x7fffffffu : ~ascending));
}

// floor(2^44 e) for e in [0, 2). For any other e the result is arbitrary. Callers multiply such a result by a share of
// 0.
RLK_HD std::uint64_t fixed_mass(float e) {
  const auto bits = static_cast<std::uint32_t>(bits_of(e));
  const int shift = static_cast<int>(bits >> 23) - (127 + 23 - 44);
  const std::uint64_t significand = (bits & 0x7fffffu) | 0x800000u;
  if (shift >= 0) return significand << (shift & 63);
  return shift > -24 ? significand >> -shift : 0;
}

// a column has a mass of 0 if its exponential is below 2^-46 of the row's largest exponential
constexpr float kMassRange = 46.0f;

// ceil(share * mass), computed exactly, for a share in [0, 1] and a mass of at most 2^63.
RLK_HD std::uint64_t share_of_mass(float share, std::uint64_t mass) {
  const auto bits = static_cast<std::uint32_t>(bits_of(share));
  const int exponent = static_cast<int>(bits >> 23 & 0xff);
  const std::uint64_t significand = exponent == 0 ? bits & 0x7fffffu : (bits & 0x7fffffu) | 0x800000u;
  const int shift = exponent == 0 ? 149 : 150 - exponent;  // share = significand * 2^-shift; shift >= 23
  const std::uint64_t low = significand * (mass & 0xffffffffu);
  const std::uint64_t high = significand * (mass >> 32) + (low >> 32), rest = low & 0xffffffffu;
  if (shift < 32) {
    const std::uint64_t whole = high << (32 - shift) | rest >> shift;
    return whole + ((rest & ((std::uint64_t{1} << shift) - 1)) != 0 ? 1 : 0);
  }
  const int above = shift - 32;
  if (above >= 64) return high != 0 || rest != 0 ? 1 : 0;
  const bool more = rest != 0 || (high & ((std::uint64_t{1} << above) - 1)) != 0;
  return (high >> above) + (more ? 1 : 0);
}

// The position of the highest set bit of x. x must not be 0.
RLK_HD int highest_bit_of(std::uint64_t x) {
#if defined(__CUDA_ARCH__)
  return 63 - __clzll(static_cast<long long>(x));
#else
  return 63 - __builtin_clzll(x);
#endif
}
// The largest float that is at most r * both / 2^32 and is not subnormal, for a random word r. `both` is the sum of two
// nodes, and is 0 or a normal number.
RLK_HD float left_bound(std::uint32_t r, float both) {
  const auto b = static_cast<std::uint32_t>(bits_of(both));
  const std::uint64_t product = std::uint64_t{r == 0 ? 1 : r} * ((b & 0x7fffffu) | 0x800000u);  // in [2^23, 2^56)
  const int top = highest_bit_of(product), exponent = static_cast<int>(b >> 23) + top - 55;
  const auto significand = static_cast<std::uint32_t>(product >> (top - 23));
  const float bound = float_of(exponent << 23 | static_cast<std::int32_t>(significand & 0x7fffffu));
  return r == 0 || exponent <= 0 ? 0.0f : bound;
}
// Whether a draw goes to the left: r * both < 2^32 * left. The sums satisfy 0 <= left <= both, and each sum is 0 or a
// normal number.
RLK_HD bool draws_left(std::uint32_t r, float left, float both) {
#if defined(__CUDA_ARCH__)
  // The operands are exact in double, and the fma rounds once. The fma's result therefore has the sign of the exact
  // difference.
  return __fma_rn(__uint2double_rn(r), static_cast<double>(both), static_cast<double>(left) * -0x1p32) < 0.0;
#else
  return left > left_bound(r, both);
#endif
}

RLK_HD int set_bits_of(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}
// The position of the lowest set bit. The word must not be 0.
RLK_HD int lowest_bit_of(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

// The height of a part's tree, whose leaves are padded to 2^height. The tree of all eight parts has height + 3 levels
// above the leaves.
// A part has whole blocks of 8 columns, but the last block of the last part may lack up to 7 columns. The last part
// always has the most blocks. If the number of blocks is a multiple of eight plus one, every other part has fewer
// blocks than the last part.
RLK_HD int leaf_height(std::int64_t vocab_size) {
  constexpr std::uint32_t kParts = kNumParts, kColumns = kLeafColumns;
  auto columns = static_cast<std::uint32_t>(vocab_size);
#if defined(__HIP_DEVICE_COMPILE__)
  asm("" : "+v"(columns));  // keeps the steps below out of SGPRs, because the merge of shards has too few of them
#endif
  const std::uint32_t blocks = (columns + 7) / 8, missing = blocks % kParts == 1 ? 8 * blocks - columns : 0;
  const std::uint32_t leaves = (8 * ((blocks + kParts - 1) / kParts) - missing + kColumns - 1) / kColumns;
  return leaves <= 1 ? 0 : highest_bit_of(leaves - 1) + 1;
}

// The index of the random word that a draw uses at `depth` levels below the root.
RLK_HD int word_of_depth(int depth, int height) { return depth < 3 ? depth : 7 + (height + 2 - depth); }
constexpr int kChainWord = 3, kPrefixWord = 6;

// The parameters of a row.
struct SampleRow {
  float temperature, top_p, min_p;
  std::int64_t top_k;
  bool greedy;
  std::int32_t status;  // the status that is known before any logit is read

  RLK_HD bool truncates() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
};
template <class Memory>
RLK_HD SampleRow sample_row_of(const SampleParams& p, std::int64_t row) {
  SampleRow r = {1.0f,
                 1.0f,
                 0.0f,
                 0,
                 p.is_greedy ? Memory::global(p.is_greedy)[row * p.greedy_stride] != 0 : p.greedy,
                 p.row_status ? Memory::global(p.row_status)[row] : std::int32_t{kOk}};
  if (r.greedy) return r;
  r.temperature = p.temperature.template at<Memory>(row);
  r.top_p = p.top_p.template at<Memory>(row);
  r.min_p = p.min_p.template at<Memory>(row);
  r.top_k = p.top_k.template at<Memory>(row);
  const std::int64_t position = p.position.template at<Memory>(row);
  if (!is_temperature(r.temperature)) r.status |= kBadTemperature;
  if (!(r.top_p > 0.0f && r.top_p <= 1.0f && r.min_p >= 0.0f && r.min_p <= 1.0f) || r.top_k < 0 ||
      r.top_k > p.most_top_k)
    r.status |= kBadParameter;
  if (position < 0 || position >= kPositions) r.status |= kBadPosition;
  r.min_p = add_rn(r.min_p, 0.0f);  // turns -0 into +0
  return r;
}

}  // namespace rlk
