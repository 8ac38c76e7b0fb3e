// e^x in fp32 with the same bits on host, CUDA and HIP.
//
//   function          valid for                      worst error over all fp32 inputs
//   exp               every x                        1.014 ulp, at 0x1.7f599ap+4
//   exp_normal        [kExpSmallest, kExpOverflow)   as exp; 12 instructions
//   exp_in_range      as exp_normal, NaN         as exp; 13 instructions
//   exp_nonpositive   x <= 0                         as exp; without the tests that x <= 0 does not need
//
// A result below 2^-126 (x < -0x1.5d589ep+6) is flushed to +0 by definition; x > 0x1.62e42ep+6 gives +Inf; NaN gives
// canonical_nan(); exp(0) == 1. Method: 2^(x log2 e) with log2 e in two terms and the polynomial of exp2.
#pragma once

#include "rlk/math/exp2.h"
#include "rlk/math/ieee.h"

namespace rlk {

constexpr float kExpSmallest = -0x1.5d589ep+6f;  // the first x whose result is not below 2^-126
constexpr float kExpOverflow = 0x1.62e43p+6f;    // the first x whose result is not below 2^128

// e^x for x in [kExpSmallest, kExpOverflow).
template <class F>
RLK_HD F exp_normal(F x) {
  const F rounded = fma_rn(x, broadcast<F>(kLog2e), broadcast<F>(kRoundToInt));
  const F n = sub_rn(rounded, broadcast<F>(kRoundToInt));
  const F f = fma_rn(x, broadcast<F>(kLog2eLow), fma_rn(x, broadcast<F>(kLog2e), -n));
  return scale_by_rounded(exp2_fraction(f), rounded);
}

// e^x for x <= 0. NaN gives +0; callers test for NaN themselves.
template <class F>
RLK_HD F exp_nonpositive(F x) {
  const auto large_enough = x >= broadcast<F>(kExpSmallest);
#if defined(__CUDA_ARCH__)
  const F y = exp_normal(x);  // if x is too small, this result is arbitrary and not used
#else                         // integer additions in a vector of the host must not overflow
  const F y = exp_normal(select(large_enough, x, broadcast<F>(0.0f)));
#endif
  return select(large_enough, y, broadcast<F>(0.0f));
}

// e^x for every x.
template <class F>
RLK_HD F exp(F x) {
  const auto large_enough = x >= broadcast<F>(kExpSmallest);
  const auto small_enough = x < broadcast<F>(kExpOverflow);
  F y = exp_normal(select(large_enough & small_enough, x, broadcast<F>(0.0f)));
  y = select(large_enough, y, broadcast<F>(0.0f));
  y = select(small_enough, y, broadcast<F>(infinity()));
  return select(is_nan(x), broadcast<F>(canonical_nan()), y);
}

// e^x for x in [kExpSmallest, kExpOverflow), and for NaN, which gives a NaN.
template <class F>
RLK_HD F exp_in_range(F x) {
#if defined(__CUDA_ARCH__)
  return fma_rn(x, broadcast<F>(0.0f), exp_normal(x));  // for NaN, exp_normal(x) is arbitrary; added to 0 * x it is NaN
#else
  return exp(x);
#endif
}

}  // namespace rlk
