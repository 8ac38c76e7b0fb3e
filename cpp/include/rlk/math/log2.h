// log2(x) and log(1 + x) in fp32 with the same bits on host, CUDA and HIP.
//
//   function       valid for          worst error over all fp32 inputs
//   log2           every x            0.978 ulp, at 0x1.72c7f6p+0
//   log2_normal    2^-126 <= x < Inf  as log2; without the tests for the ends of the range
//   log1p          every x            0.951 ulp, at 0x1.bc9ec2p-2
//   log1p_finite   -1 < x < Inf       as log1p; without the tests for the ends of the range
//
// log2:  0 and -0 give -Inf; x < 0 and NaN give canonical_nan(); +Inf gives +Inf; a subnormal x is as accurate as any
//        other; log2(2^k) == k for every integer k.
// log1p: -1 gives -Inf; x < -1 and NaN give canonical_nan(); +Inf gives +Inf; -0 gives -0.
// Neither function decreases from one fp32 value to the next. Coefficients come from tools/minimax.py for the relative
// error of the result. Each coefficient is rounded to fp32 before the next coefficient is solved for.
#pragma once

#include "rlk/math/horner.h"
#include "rlk/math/ieee.h"

namespace rlk {

// log2(1 + f) / f - 1. The term 1 * f is not in the polynomial. The last fma adds it exactly, so the error stays below
// 1 ulp.
constexpr float kLog2C0 = 0x1.c551dap-2f;
constexpr float kLog2C1 = -0x1.715476p-1f;
constexpr float kLog2C2 = 0x1.ec7022p-2f;
constexpr float kLog2C3 = -0x1.7156c6p-2f;
constexpr float kLog2C4 = 0x1.278bbp-2f;
constexpr float kLog2C5 = -0x1.eb6c08p-3f;
constexpr float kLog2C6 = 0x1.a21cf4p-3f;
constexpr float kLog2C7 = -0x1.818b8cp-3f;
constexpr float kLog2C8 = 0x1.7eb328p-3f;
constexpr float kLog2C9 = -0x1.dcc02ep-4f;

// (log(1 + f) - f) / f^2
constexpr float kLog1pC0 = -0x1.fffff8p-2f;
constexpr float kLog1pC1 = 0x1.55555p-2f;
constexpr float kLog1pC2 = -0x1.000438p-2f;
constexpr float kLog1pC3 = 0x1.99a41cp-3f;
constexpr float kLog1pC4 = -0x1.5423e8p-3f;
constexpr float kLog1pC5 = 0x1.226c84p-3f;
constexpr float kLog1pC6 = -0x1.0f5208p-3f;
constexpr float kLog1pC7 = 0x1.0875p-3f;
constexpr float kLog1pC8 = -0x1.38138ep-4f;

// x = 2^exponent * significand for a normal x > 0, with the significand in [sqrt(1/2), sqrt(2)). Near x = 1 the
// exponent is 0, so adding it to log2(significand) cancels no digits.
template <class F>
struct SplitFloat {
  F exponent;
  F significand;
};
template <class F>
RLK_HD SplitFloat<F> split_float(F x) {
  const auto bits = bits_of(x);
  const auto exponent = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is the first float above sqrt(1/2)
  // Adding the integer to the low bits of 1.5 * 2^23, and subtracting 1.5 * 2^23, converts the integer to fp32.
  return {sub_rn(float_of(exponent + 0x4b400000), broadcast<F>(0x1.8p+23f)), float_of(bits - (exponent << 23))};
}

// log2(x) for a normal, finite x > 0.
template <class F>
RLK_HD F log2_normal(F x) {
  const SplitFloat<F> s = split_float(x);
  const F f = sub_rn(s.significand, broadcast<F>(1.0f));  // exact
  const F slope = horner(f, kLog2C0, kLog2C1, kLog2C2, kLog2C3, kLog2C4, kLog2C5, kLog2C6, kLog2C7, kLog2C8, kLog2C9);
  return add_rn(s.exponent, fma_rn(f, slope, f));
}

// log2(x) for every x.
template <class F>
RLK_HD F log2(F x) {
  const auto subnormal = x < broadcast<F>(0x1.0p-126f);
  const F scaled = select(subnormal, mul_rn(x, broadcast<F>(0x1.0p+24f)), x);
  const auto positive = x > broadcast<F>(0.0f);
  const auto finite = x < broadcast<F>(infinity());
  F y = log2_normal(select(positive & finite, scaled, broadcast<F>(1.0f)));
  y = select(subnormal, sub_rn(y, broadcast<F>(24.0f)), y);
  y = select(finite, y, broadcast<F>(infinity()));
  y = select(positive, y, broadcast<F>(-infinity()));
  return select(x >= broadcast<F>(0.0f), y, broadcast<F>(canonical_nan()));
}

// log(1 + x) for -1 < x < +Inf; -0 gives +0.
template <class F>
RLK_HD F log1p_finite(F x) {
  const F one = broadcast<F>(1.0f);
  // 1 + x = sum + lost, exactly.
  const F sum = add_rn(one, x);
  const F lost = select(x < one, sub_rn(x, sub_rn(sum, one)), sub_rn(one, sub_rn(sum, x)));
  const SplitFloat<F> s = split_float(sum);
  // 1 + f + f_lost = (sum + lost) * 2^-exponent. From x = 2^30 on, the correction is 0: it would not change the result,
  // and the scale could be 2^-128, which is not normal.
  const F scale = float_of(bits_of(s.significand) - bits_of(sum) + 0x3f800000);
  const F correction = select(x < broadcast<F>(0x1.0p+30f), mul_rn(lost, scale), broadcast<F>(0.0f));
  const F above = sub_rn(s.significand, one);
  const F f = add_rn(above, correction);
  const F f_lost = add_rn(sub_rn(above, f), correction);
  const F curvature =
      horner(f, kLog1pC0, kLog1pC1, kLog1pC2, kLog1pC3, kLog1pC4, kLog1pC5, kLog1pC6, kLog1pC7, kLog1pC8);
  // exponent * ln 2 + f + f^2 * curvature, largest terms first, plus the rounding error of their sum.
  const F integral = mul_rn(s.exponent, broadcast<F>(kLn2High));  // exact
  const F high = add_rn(integral, f);
  const F low = add_rn(sub_rn(f, sub_rn(high, integral)), fma_rn(s.exponent, broadcast<F>(kLn2Low), f_lost));
  return add_rn(high, fma_rn(mul_rn(f, f), curvature, low));
}

// log(1 + x) for every x.
template <class F>
RLK_HD F log1p(F x) {
  const auto above = x > broadcast<F>(-1.0f);
  const auto finite = x < broadcast<F>(infinity());
  F y = log1p_finite(select(above & finite, x, broadcast<F>(1.0f)));
  y = select(x == broadcast<F>(0.0f), x, y);  // keeps -0
  y = select(finite, y, broadcast<F>(infinity()));
  y = select(above, y, broadcast<F>(-infinity()));
  return select(x >= broadcast<F>(-1.0f), y, broadcast<F>(canonical_nan()));
}

}  // namespace rlk
