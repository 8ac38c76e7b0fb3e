// The error function in fp32 with the same bits on host, CUDA and HIP.
//
//   function       valid for    worst error over all fp32 inputs
//   erf            every x      0.986 ulp, at 0x1.fda8fep-1
//
// erf is exactly odd, |erf(x)| <= 1, -0 gives -0, +-Inf give +-1, NaN gives canonical_nan(). The result never decreases
// from one fp32 value to the next.
// Method: x + x p(x^2) for x below 1; 1 - 2^g(x - 1) above 1, where g(x - 1) is log2(1 - erf(x)). The error of g is
// smallest where 1 - erf(x) is largest.
// Coefficients come from tools/minimax.py for the relative error of the result. Each coefficient is rounded to fp32
// before the next coefficient is solved for.
#pragma once

#include "rlk/math/exp2.h"
#include "rlk/math/horner.h"
#include "rlk/math/ieee.h"

namespace rlk {

// erf(x) / x - 1 in powers of x^2, for x in [0, 1]
constexpr float kErfC0 = 0x1.06eba8p-3f;
constexpr float kErfC1 = -0x1.81273ep-2f;
constexpr float kErfC2 = 0x1.ce2ce6p-4f;
constexpr float kErfC3 = -0x1.b7f71ap-6f;
constexpr float kErfC4 = 0x1.53f224p-8f;
constexpr float kErfC5 = -0x1.a3515ep-11f;
constexpr float kErfC6 = 0x1.4771fep-14f;

// log2(1 - erf(1 + d)), for d in [0, 3]
constexpr float kErfcC0 = -0x1.558eaep+1f;
constexpr float kErfcC1 = -0x1.e75306p+1f;
constexpr float kErfcC2 = -0x1.37666ap+0f;
constexpr float kErfcC3 = -0x1.e8d72ep-5f;
constexpr float kErfcC4 = 0x1.c73882p-7f;
constexpr float kErfcC5 = -0x1.31809p-9f;
constexpr float kErfcC6 = 0x1.7ddc8ep-13f;

template <class F>
RLK_HD F erf(F x) {
  const F magnitude = abs_of(x);
  const F a = select(magnitude < broadcast<F>(4.0f), magnitude, broadcast<F>(4.0f));  // a NaN also becomes 4

  const F p = horner(mul_rn(a, a), kErfC0, kErfC1, kErfC2, kErfC3, kErfC4, kErfC5, kErfC6);
  const F below = fma_rn(a, p, a);

  const F one = broadcast<F>(1.0f);
  const F g = horner(sub_rn(a, one), kErfcC0, kErfcC1, kErfcC2, kErfcC3, kErfcC4, kErfcC5, kErfcC6);
  const F above = sub_rn(one, exp2_normal(g));

  const F y = copysign_of(select(a < one, below, above), x);
  return select(is_nan(x), broadcast<F>(canonical_nan()), y);
}

}  // namespace rlk
