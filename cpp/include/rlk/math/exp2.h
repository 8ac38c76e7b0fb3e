// 2^x in fp32 with the same bits on host, CUDA and HIP.
//
//   function       valid for         degree  worst error over all fp32 inputs
//   exp2           every x           6       0.800 ulp, at -0x1.ff2c82p-2
//   exp2_normal    [-126, 128)       6       as exp2; 11 instructions
//   exp2_stat      [-0.5, 0.5]       4       39.1 ulp (relative 2^-18.5), at -0x1.6537acp-3
//
// exp2: x < -126 gives +0, x >= 128 gives +Inf, NaN gives canonical_nan(). Results below 2^-126 are flushed to +0 by
// definition, so that the bits do not depend on how a backend handles subnormals. The result is exact for integers from
// -126 to 127.
// exp2 is not monotonic: from one fp32 value to the next the result may fall by 1 ulp.
// Coefficients come from tools/minimax.py for the relative error. Each coefficient is rounded to fp32 before the next
// coefficient is solved for.
#pragma once

#include "rlk/math/horner.h"
#include "rlk/math/ieee.h"

namespace rlk {

constexpr float kExp2StatC0 = 0x1.0p+0f;  // fixed at 1: if a single column has an integer c z, S is exactly 1
constexpr float kExp2StatC1 = 0x1.62e12cp-1f;
constexpr float kExp2StatC2 = 0x1.ec036ep-3f;
constexpr float kExp2StatC3 = 0x1.c9fc68p-5f;
constexpr float kExp2StatC4 = 0x1.3a0518p-7f;

constexpr float kExp2C0 = 0x1.0p+0f;  // fixed at 1, so that integers are exact
constexpr float kExp2C1 = 0x1.62e43p-1f;
constexpr float kExp2C2 = 0x1.ebfbdcp-3f;
constexpr float kExp2C3 = 0x1.c6af7cp-5f;
constexpr float kExp2C4 = 0x1.3b2dep-7f;
constexpr float kExp2C5 = 0x1.5f082ep-10f;
constexpr float kExp2C6 = 0x1.416b5ep-13f;

// Adding 1.5 * 2^23 to |x| < 2^22 rounds x to the nearest integer (ties to even); the low bits of the sum hold this
// integer.
constexpr float kRoundToInt = 0x1.8p+23f;

// 2^f for f in [-0.5, 0.5], result in [0.707, 1.415]. Softmax statistics alone use this exponential. In a sum of
// positive terms its relative error averages out. The function has two fma fewer than exp2, so that statistics run at
// HBM bandwidth. exp2_stat(0) is 1.
template <class F>
RLK_HD F exp2_stat(F f) {
  return horner(f, kExp2StatC0, kExp2StatC1, kExp2StatC2, kExp2StatC3, kExp2StatC4);
}

// 2^f for f in [-0.5, 0.5].
template <class F>
RLK_HD F exp2_fraction(F f) {
  return horner(f, kExp2C0, kExp2C1, kExp2C2, kExp2C3, kExp2C4, kExp2C5, kExp2C6);
}

// significand * 2^n, where rounded = n + kRoundToInt. n is added to the exponent field, so the product must be normal,
// zero or +Inf.
template <class F>
RLK_HD F scale_by_rounded(F significand, F rounded) {
  return float_of(bits_of(significand) + (bits_of(rounded) << 23));
}

// 2^x for x in [-126, 128), without the tests for the ends of the range. The result is also exactly +0 at -127 and +Inf
// at 128.
template <class F>
RLK_HD F exp2_normal(F x) {
  const F rounded = add_rn(x, broadcast<F>(kRoundToInt));
  const F n = sub_rn(rounded, broadcast<F>(kRoundToInt));
  return scale_by_rounded(exp2_fraction(sub_rn(x, n)), rounded);
}

// 2^x for every x.
template <class F>
RLK_HD F exp2(F x) {
  const F from_below = select(x >= broadcast<F>(-126.0f), x, broadcast<F>(-127.0f));  // a NaN also becomes -127
  const F in_range = select(from_below < broadcast<F>(128.0f), from_below, broadcast<F>(128.0f));
  return select(is_nan(x), broadcast<F>(canonical_nan()), exp2_normal(in_range));
}

}  // namespace rlk
