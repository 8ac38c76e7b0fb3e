// The logistic function and its logarithm in fp32 with the same bits on host, CUDA and HIP.
//
//   function       formula           worst error over all fp32 inputs
//   sigmoid        1 / (1 + e^-x)    2.402 ulp, at -0x1.0a111ap+2 (x >= 0: 1.499 ulp)
//   sigmoids       sigmoid of x and of -x
//   logsigmoid     log(sigmoid(x))   1.652 ulp, at 0x1.426b88p+0
//
// All functions use e = e^-|x| <= 1, so nothing overflows. e below 2^-126 is +0 (exp.h), so sigmoid is +0 for
// x < -0x1.5d589ep+6 and logsigmoid is +0 for x > 0x1.5d589ep+6. sigmoid(0) == 0.5. NaN gives canonical_nan();
// logsigmoid(-Inf) is -Inf.
#pragma once

#include "rlk/math/exp.h"
#include "rlk/math/ieee.h"
#include "rlk/math/log2.h"

namespace rlk {

// sigmoid without the test for NaN; a NaN gives 1.
template <class F>
RLK_HD F sigmoid_of_number(F x) {
  const F one = broadcast<F>(1.0f);
  const F e = exp_nonpositive(-abs_of(x));
  return div_in_range(select(x < broadcast<F>(0.0f), e, one), add_rn(one, e));
}

template <class F>
RLK_HD F sigmoid(F x) {
  return select(is_nan(x), broadcast<F>(canonical_nan()), sigmoid_of_number(x));
}

// sigmoid_of_number for numbers of a 16-bit type. On CUDA it takes three instructions less. half_exponential is e^-|x|;
// it is subnormal where exp_nonpositive gives +0. |x| above 88 counts as 88, since e^-88 is subnormal already.
RLK_HD float half_exponential(float x) {
  return exp_normal(-__builtin_fminf(abs_of(x), 88.0f));  // NaN: e^-88
}
// `negative` must equal x < 0.
RLK_HD float sigmoid_of_half(float x, [[maybe_unused]] bool negative) {
#if defined(__CUDA_ARCH__)
  const float e = half_exponential(x), d = add_rn(1.0f, e);
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(d));
  return short_quotient_of(select(negative, e, 1.0f), d, reciprocal);
#else
  return sigmoid_of_number(x);
#endif
}
RLK_HD float sigmoid_of_half(float x) { return sigmoid_of_half(x, x < 0.0f); }

// sigmoid(x) and sigmoid(-x) from one exponential. 1 - sigmoid(x) would lose the digits of sigmoid(-x).
template <class F>
struct Sigmoids {
  F up, down;
};
template <class F>
RLK_HD Sigmoids<F> sigmoids(F x) {
  const F one = broadcast<F>(1.0f), e = exp_nonpositive(-abs_of(x)), sum = add_rn(one, e);
  const F most = div_in_range(one, sum), least = div_in_range(e, sum);
  const auto negative = x < broadcast<F>(0.0f), nan = is_nan(x);
  const F none = broadcast<F>(canonical_nan());
  return {select(nan, none, select(negative, least, most)), select(nan, none, select(negative, most, least))};
}

template <class F>
RLK_HD F logsigmoid(F x) {
  const F zero = broadcast<F>(0.0f);
  const F y = sub_rn(select(x < zero, x, zero), log1p_finite(exp_nonpositive(-abs_of(x))));
  return select(is_nan(x), broadcast<F>(canonical_nan()), y);
}

}  // namespace rlk
