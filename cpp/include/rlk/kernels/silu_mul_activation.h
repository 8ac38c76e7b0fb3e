// The activations of ops/silu_mul.h and their derivatives, as every backend computes them. Templates also run on the vectors
// of cpp/cpu/simd.h.
#pragma once

#include "rlk/math/erf.h"
#include "rlk/math/exp.h"
#include "rlk/math/ieee.h"
#include "rlk/math/sigmoid.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/silu_mul.h"

namespace rlk {

// An activation and, where kSlope asks for it, its derivative.
template <class F>
struct Activated {
  F value, slope;
};

template <Activation kActivation, bool kSlope, class F>
RLK_HD Activated<F> activated(F g) {
  const F one = broadcast<F>(1.0f), half = broadcast<F>(0.5f), limit = broadcast<F>(kGateLimit);
  const F m = select(g < -limit, -limit, g);
  const F c = kSlope ? select(m > limit, limit, m) : m;
  Activated<F> r{g, g};
  if constexpr (kActivation == Activation::kSilu) {
    const F s = sigmoid_of_number(g);  // a NaN comes back by the products
    r.value = mul_rn(m, s);
    if constexpr (kSlope) r.slope = mul_rn(s, fma_rn(c, sub_rn(one, s), one));
  } else if constexpr (kActivation == Activation::kGelu) {
    const F w = add_rn(one, erf(mul_rn(g, broadcast<F>(kSqrtHalf))));
    r.value = mul_rn(mul_rn(half, m), w);
    if constexpr (kSlope) {
      const F density = mul_rn(broadcast<F>(kInvSqrtTwoPi), exp_nonpositive(mul_rn(-half, mul_rn(c, c))));
      r.slope = fma_rn(c, density, mul_rn(half, w));
    }
  } else {
    const F cubic = fma_rn(mul_rn(broadcast<F>(kGeluCubic), mul_rn(g, g)), g, g);
    const F t = tanh(mul_rn(broadcast<F>(kSqrtTwoOverPi), cubic));
    const F w = add_rn(one, t);
    r.value = mul_rn(mul_rn(half, m), w);
    if constexpr (kSlope) {
      const F inner = mul_rn(broadcast<F>(kSqrtTwoOverPi), fma_rn(broadcast<F>(kGeluCubicTimes3), mul_rn(c, c), one));
      r.slope = fma_rn(mul_rn(mul_rn(half, c), fma_rn(-t, t, one)), inner, mul_rn(half, w));
    }
  }
  return r;
}

// Calls f(ActivationConstant<...>{}) with the activation of a call.
template <Activation kActivation>
struct ActivationConstant {
  static constexpr Activation value = kActivation;
};
template <class F>
inline __attribute__((always_inline)) void with_activation(Activation activation, const F& f) {
  switch (activation) {
    case Activation::kSilu:
      return f(ActivationConstant<Activation::kSilu>{});
    case Activation::kGelu:
      return f(ActivationConstant<Activation::kGelu>{});
    default:
      return f(ActivationConstant<Activation::kGeluTanh>{});
  }
}

}  // namespace rlk
