// e^x - 1 in fp32 with the same bits on host, CUDA and HIP.
//
//   function       valid for    worst error over all fp32 inputs
//   expm1          every x      0.890 ulp, at 0x1.62fcbap-2
//   expm1_in_range [-20, 89], NaN  as expm1, but without the tests that only other x need
//
// -0 gives -0 and |x| < 2^-25 gives x; -Inf gives -1; x > 0x1.62e42ep+6 gives +Inf; NaN gives canonical_nan(). The
// result never decreases from one fp32 value to the next.
// Method: x = n ln 2 + r, e^r - 1 = r + r^2 q(r), then 2^n (e^r - 1) + (2^n - 1). The method adds back the rounding
// error of each large sum. Coefficients come from tools/minimax.py for the relative error of e^r - 1. Each coefficient
// is rounded to fp32 before the next coefficient is solved for.
#pragma once

#include "rlk/math/exp2.h"
#include "rlk/math/horner.h"
#include "rlk/math/ieee.h"

namespace rlk {

// (e^r - 1 - r) / r^2
constexpr float kExpm1C0 = 0x1.0p-1f;
constexpr float kExpm1C1 = 0x1.555554p-3f;
constexpr float kExpm1C2 = 0x1.5554f8p-5f;
constexpr float kExpm1C3 = 0x1.1112dcp-7f;
constexpr float kExpm1C4 = 0x1.6d3a54p-10f;
constexpr float kExpm1C5 = 0x1.9e66fp-13f;

// e^z - 1 for z in [-20, 89].
template <class F>
RLK_HD F expm1_normal(F z) {
  // z = n ln 2 + r + r_lost
  const F rounded = fma_rn(z, broadcast<F>(kLog2e), broadcast<F>(kRoundToInt));
  const F n = sub_rn(rounded, broadcast<F>(kRoundToInt));
  const F minus_n = -n;
  const F reduced = fma_rn(minus_n, broadcast<F>(kLn2High), z);  // exact
  const F r = fma_rn(minus_n, broadcast<F>(kLn2Low), reduced);
  const F r_lost = fma_rn(minus_n, broadcast<F>(kLn2Low), sub_rn(reduced, r));
  const F q = horner(r, kExpm1C0, kExpm1C1, kExpm1C2, kExpm1C3, kExpm1C4, kExpm1C5);
  const F tail = fma_rn(mul_rn(r, r), q, r_lost);  // e^(r + r_lost) - 1 - r

  // Computes half of the result, since 2^n may be 2^128.
  const F half = broadcast<F>(0.5f);
  const F scale = scale_by_rounded(half, rounded);
  const F offset = sub_rn(scale, half);
  const F offset_lost = sub_rn(sub_rn(scale, offset), half);
  const F high = fma_rn(scale, r, offset);
  const F low = add_rn(fma_rn(scale, r, sub_rn(offset, high)), offset_lost);
  const F y = add_rn(high, fma_rn(scale, tail, low));

  return select(abs_of(z) < broadcast<F>(0x1.0p-25f), z, add_rn(y, y));
}

template <class F>
RLK_HD F expm1(F x) {
  // At -20 the result rounds to -1, and at 89 it overflows.
  const F from_below = select(x > broadcast<F>(-20.0f), x, broadcast<F>(-20.0f));  // a NaN also becomes -20
  const F z = select(from_below < broadcast<F>(89.0f), from_below, broadcast<F>(89.0f));
  return select(is_nan(x), broadcast<F>(canonical_nan()), expm1_normal(z));
}

// e^x - 1 for x in [-20, 89], and for NaN, which gives a NaN.
template <class F>
RLK_HD F expm1_in_range(F x) {
#if defined(__CUDA_ARCH__)
  return expm1_normal(x);
#else  // integer additions in a vector of the host must not overflow
  return expm1(x);
#endif
}

}  // namespace rlk
