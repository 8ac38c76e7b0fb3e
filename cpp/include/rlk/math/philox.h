// Philox4x32-10, a counter-based generator: a random number is a pure function of (seed, sample, position, lane). So a
// token draws the same number in any batch, on any rank and on every backend, and can draw it again later.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/math/ieee.h"

namespace rlk {

struct PhiloxBlock {
  std::uint32_t x, y, z, w;
};

RLK_HD std::uint32_t mul_hi(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>((std::uint64_t{a} * b) >> 32);
}

// The bijection of the paper above: ten rounds on a 128-bit counter with a 64-bit key.
RLK_HD PhiloxBlock philox4x32(PhiloxBlock counter, std::uint32_t key_lo, std::uint32_t key_hi) {
  constexpr std::uint32_t kMul0 = 0xd2511f53u, kMul1 = 0xcd9e8d57u;  // the paper's multipliers
  constexpr std::uint32_t kWeyl0 = 0x9e3779b9u;                      // golden ratio
  constexpr std::uint32_t kWeyl1 = 0xbb67ae85u;                      // sqrt(3) - 1
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t hi0 = mul_hi(kMul0, counter.x), lo0 = kMul0 * counter.x;
    const std::uint32_t hi1 = mul_hi(kMul1, counter.z), lo1 = kMul1 * counter.z;
    counter = {hi1 ^ counter.y ^ key_lo, lo1, hi0 ^ counter.w ^ key_hi, lo0};
    key_lo += kWeyl0;
    key_hi += kWeyl1;
  }
  return counter;
}

// The project's counter layout:
//   key      = seed                      low 32 bits in word 0, high 32 bits in word 1
//   counter  = [sample_id low, sample_id high, position, lane / 4]
//   number   = word lane % 4 of the block
// `sample_id` names a rollout, never a batch slot. `position` is the index of the token to be drawn in its sequence.
// `lane` numbers the draws of one token: 0 for inverse-CDF sampling, the vocabulary column for Gumbel-max.
// covariance_mask draws among the tokens of one call, so its sample_id is the place of the sequence in the call.
RLK_HD PhiloxBlock philox_block(std::uint64_t seed, std::uint64_t sample_id, std::uint32_t position,
                                std::uint32_t block) {
  const auto low = [](std::uint64_t v) { return static_cast<std::uint32_t>(v); };
  return philox4x32({low(sample_id), low(sample_id >> 32), position, block}, low(seed), low(seed >> 32));
}

RLK_HD std::uint32_t philox_bits(std::uint64_t seed, std::uint64_t sample_id, std::uint32_t position,
                                 std::uint32_t lane) {
  const PhiloxBlock b = philox_block(seed, sample_id, position, lane / 4);
  const std::uint32_t even = (lane & 2) ? b.z : b.x, odd = (lane & 2) ? b.w : b.y;
  return (lane & 1) ? odd : even;
}

// Number in [0, 1): the upper 24 bits times 2^-24. The product is exact, so it has the same bits everywhere; 1 is never
// returned.
RLK_HD float uniform_of_bits(std::uint32_t bits) { return mul_rn(static_cast<float>(bits >> 8), 0x1p-24f); }

// Number in (0, 1]: fma(fl32(bits), 2^-32, 2^-33), with two roundings to nearest even. Near 0, all 32 bits affect the
// result. The least value is 2^-33, and its log() is finite.
RLK_HD float positive_uniform_of_bits(std::uint32_t bits) {
  return fma_rn(static_cast<float>(bits), 0x1p-32f, 0x1p-33f);
}

RLK_HD float philox_uniform(std::uint64_t seed, std::uint64_t sample_id, std::uint32_t position, std::uint32_t lane) {
  return uniform_of_bits(philox_bits(seed, sample_id, position, lane));
}

RLK_HD float philox_positive_uniform(std::uint64_t seed, std::uint64_t sample_id, std::uint32_t position,
                                     std::uint32_t lane) {
  return positive_uniform_of_bits(philox_bits(seed, sample_id, position, lane));
}

}  // namespace rlk
