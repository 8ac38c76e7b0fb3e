// tanh(x) in fp32 with the same bits on host, CUDA and HIP.
//
//   function       valid for    worst error over all fp32 inputs
//   tanh           every x      1.165 ulp, at 0x1.7921fep-1
//
// tanh is exactly odd, |tanh(x)| <= 1, -0 gives -0, subnormals return themselves, +-Inf give +-1, NaN gives
// canonical_nan(). The result never decreases from one fp32 value to the next.
// Method: x + x^3 p(x^2) below kTanhSplit, and 1 - 2 / (e^2x + 1) above it. Below kTanhSplit the second formula would
// lose digits. Coefficients come from tools/minimax.py for the relative error of the result. Each coefficient is
// rounded to fp32 before the next coefficient is solved for.
#pragma once

#include "rlk/math/exp2.h"
#include "rlk/math/horner.h"
#include "rlk/math/ieee.h"

namespace rlk {

constexpr float kTanhSplit = 0.7f;

// (tanh(x) / x - 1) / x^2 in powers of x^2
constexpr float kTanhC0 = -0x1.55555p-2f;
constexpr float kTanhC1 = 0x1.110f52p-3f;
constexpr float kTanhC2 = -0x1.b9bb3cp-5f;
constexpr float kTanhC3 = 0x1.617feep-6f;
constexpr float kTanhC4 = -0x1.02974p-7f;
constexpr float kTanhC5 = 0x1.f256p-10f;

template <class F>
RLK_HD F tanh(F x) {
  const F magnitude = abs_of(x);
  // A NaN also becomes 10; tanh(10) = 1.
  const F a = select(magnitude < broadcast<F>(10.0f), magnitude, broadcast<F>(10.0f));

  const F u = mul_rn(a, a);
  const F p = horner(u, kTanhC0, kTanhC1, kTanhC2, kTanhC3, kTanhC4, kTanhC5);
  const F below = fma_rn(mul_rn(u, a), p, a);

  const F rounded = fma_rn(a, broadcast<F>(2.0f * kLog2e), broadcast<F>(kRoundToInt));
  const F n = sub_rn(rounded, broadcast<F>(kRoundToInt));
  const F e = scale_by_rounded(exp2_fraction(fma_rn(a, broadcast<F>(2.0f * kLog2e), -n)), rounded);
  const F one = broadcast<F>(1.0f);
  const F above = sub_rn(one, div_in_range(broadcast<F>(2.0f), add_rn(e, one)));

  const F y = copysign_of(select(a < broadcast<F>(kTanhSplit), below, above), x);
  return select(is_nan(x), broadcast<F>(canonical_nan()), y);
}

}  // namespace rlk
