// ex2.approx.ftz.f32 of sm_90 in integer arithmetic, bit for bit, so that the host reproduces what an H200 computes.
//
// The unit is a quadratic interpolator of the kind described by Oberman & Siu, "A high-performance area-efficient
// multifunction interpolator", ARITH 2005. The argument is converted to fixed point with 23 fractional bits. Its
// fraction is split into a segment (6 bits) and an offset o (17 bits). The significand of the result, in units in the
// last place, is
//   (8192 * c0 + c1 * o + c2 * square(o) + 6114) >> 15        square(o) ~ o^2 / 2^19
// c0 is in quarters of a unit, and 6114 / 2^15 of a unit is the rounding constant. The squarer drops every partial
// product whose weight is below its last column. Coefficients, constant and squarer were recovered from the
// instruction's results. In tests/cpp, test_models.cpp compares all 2^23 significands with a recorded digest;
// in tests/gpu, test_models.cu compares all 2^32 arguments with the instruction.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/math/ieee.h"

namespace rlk {

// clang-format off
// Coefficients of a segment, as functions because device code cannot index a host array.
RLK_HD std::int32_t mufu_ex2_c0(std::int32_t segment) {
  static constexpr std::int32_t kTable[64] = {
             3,   365386,   734750,  1108133,  1485586,  1867145,  2252860,  2642777,
       3036940,  3435393,  3838184,  4245365,  4656977,  5073072,  5493699,  5918905,
       6348741,  6783258,  7222505,  7666538,  8115404,  8569160,  9027854,  9491545,
       9960285, 10434129, 10913133, 11397354, 11886846, 12381669, 12881882, 13387539,
      13898703, 14415435, 14937793, 15465837, 15999633, 16539242, 17084727, 17636150,
      18193579, 18757078, 19326714, 19902551, 20484659, 21073106, 21667961, 22269293,
      22877175, 23491674, 24112865, 24740822, 25375616, 26017322, 26666015, 27321773,
      27984672, 28654788, 29332202, 30016992, 30709240, 31409026, 32116431, 32831540,
  };
  return kTable[segment];
}
RLK_HD std::int32_t mufu_ex2_c1(std::int32_t segment) {
  static constexpr std::int32_t kTable[64] = {
      22713, 22960, 23210, 23463, 23718, 23977, 24238, 24502,
      24768, 25038, 25311, 25586, 25865, 26147, 26431, 26719,
      27010, 27304, 27602, 27902, 28206, 28513, 28824, 29138,
      29455, 29776, 30100, 30428, 30759, 31094, 31432, 31775,
      32121, 32471, 32824, 33182, 33543, 33908, 34277, 34651,
      35028, 35409, 35795, 36185, 36579, 36977, 37380, 37787,
      38198, 38614, 39035, 39460, 39889, 40324, 40763, 41207,
      41655, 42109, 42568, 43031, 43500, 43973, 44452, 44936,
  };
  return kTable[segment];
}
RLK_HD std::int32_t mufu_ex2_c2(std::int32_t segment) {
  static constexpr std::int32_t kTable[64] = {
      494, 501, 506, 511, 518, 521, 527, 532,
      541, 546, 551, 559, 564, 568, 577, 583,
      589, 596, 600, 609, 615, 622, 627, 633,
      641, 647, 655, 661, 670, 677, 686, 691,
      699, 705, 715, 721, 730, 739, 748, 753,
      763, 773, 779, 787, 796, 806, 813, 822,
      833, 842, 849, 858, 870, 877, 887, 896,
      909, 917, 925, 938, 946, 959, 969, 980,
  };
  return kTable[segment];
}
// clang-format on

// Folded square of the 17-bit offset in units of 2^19. Partial products o_i * o_j (i < j, weight 2^(i+j+1)) and o_i
// (weight 2^(2i)) lighter than 2^19 are dropped one by one, before they can carry.
RLK_HD std::int32_t mufu_square(std::int32_t offset) {
  const std::int32_t high = offset >> 9;
  std::int32_t square = (high * high) >> 1;  // rows 9..16 are complete except for o_9 itself (2^18), which the shift
                                             // drops
  for (int i = 2; i <= 8; ++i)               // row i keeps its products with j >= 18 - i
    square += -((offset >> i) & 1) & (offset >> (18 - i));
  return square;
}

// Significand field (23 bits, hidden bit absent) of 2^(fraction / 2^23), for fraction in [0, 2^23).
RLK_HD std::int32_t mufu_ex2_significand(std::int32_t fraction) {
  const std::int32_t segment = fraction >> 17, offset = fraction & 0x1ffff;
  const std::int32_t c0 = mufu_ex2_c0(segment);
  // The formula above without its whole units. The whole units (c0 >> 2, and `offset` from 32768 of c1) are added
  // below, so |rest| < 2^31.
  const std::int32_t rest =
      (mufu_ex2_c1(segment) - 32768) * offset + mufu_ex2_c2(segment) * mufu_square(offset) + ((c0 & 3) << 13) + 6114;
  return (c0 >> 2) + offset + (rest >> 15);
}

// The argument in fixed point with 23 fractional bits, for |x| < 256. |x| is cut, then negated in one's complement. If
// the cut value is a whole number, 1 is added, which gives two's complement.
RLK_HD std::int32_t mufu_ex2_fixed(float x) {
  const std::int32_t cut = static_cast<std::int32_t>(mul_rn(abs_of(x), 0x1p23f));  // an exact product, cut toward zero
  const std::int32_t complement = ~cut + ((cut & 0x7fffff) == 0 ? 1 : 0);
  return bits_of(x) < 0 ? complement : cut;
}

// For x in [-255, 128): no NaN, no overflow. Results below 2^-126 are +0. The function has no branch and no call, so a
// loop over softmax terms (x in [-127, 1]) vectorises; its three loads become gathers.
RLK_HD float mufu_ex2_sm90_bounded(float x) {
  const std::int32_t t = mufu_ex2_fixed(x);
  const std::int32_t exponent = (t >> 23) + 127;
  const std::int32_t bits = mufu_ex2_significand(t & 0x7fffff) + (exponent << 23);
  return float_of(exponent > 0 ? bits : 0);
}

// Every fp32 argument. Arguments below -126 and -Inf give +0, subnormals and zeros give 1, arguments from 128 on give
// +Inf, and NaN gives 0x7fffffff.
RLK_HD float mufu_ex2_sm90(float x) {
  const float magnitude = abs_of(x);
  const float y = mufu_ex2_sm90_bounded(copysign_of(magnitude < 255.0f ? magnitude : 255.0f, x));
  const std::int32_t finite = x >= 128.0f ? 0x7f800000 : bits_of(y);
  return float_of(magnitude <= infinity() ? finite : 0x7fffffff);
}

}  // namespace rlk
