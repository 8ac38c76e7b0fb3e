// The formulas of ops/silu_mul.h as every backend computes them.
#pragma once

#include "kernels/rows/elementwise.h"
#include "rlk/math/erf.h"
#include "rlk/math/exp.h"
#include "rlk/math/ieee.h"
#include "rlk/math/sigmoid.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/silu_mul.h"

namespace rlk {

// The value of an activation and, with kSlope, its derivative.
template <class F>
struct Activated {
  F value, slope;
};

// kHalf: g is a number of a 16-bit type, which lets the backend save instructions.
template <Activation kActivation, bool kSlope, bool kHalf = false, class F>
RLK_HD Activated<F> activated(F g) {
  const F one = broadcast<F>(1.0f), half = broadcast<F>(0.5f), limit = broadcast<F>(kGateLimit);
  const F m = select(g < -limit, -limit, g);
  const F c = kSlope ? select(m > limit, limit, m) : m;
  Activated<F> r{g, g};
  if constexpr (kActivation == Activation::kSilu) {
    F s;  // wrong for a NaN, but the products below then give NaN
    if constexpr (kHalf) {
      s = sigmoid_of_half(g);
    } else {
      s = sigmoid_of_number(g);
    }
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

// The activations of several columns at once. A backend may overload this function with cheaper code.
template <Activation kActivation, class V>
RLK_DEVICE auto activations(const V& gate) {
  return each([](auto g) { return activated<kActivation, false, kGainsFromHalves<V>>(g).value; }, gate);
}

template <>
struct Elementwise<GatedMulParams> {
  using P = GatedMulParams;
  static constexpr const char* kName = "silu_mul";
  static constexpr const char* kArrays[] = {"gate", "up", "y"};
  static constexpr auto kForm = &P::activation;
  using Inputs = Arrays<Rows<&P::gate, &P::gate_rows>, Rows<&P::up, &P::up_rows, &P::gate_rows>>;
  using Outputs = Arrays<Rows<&P::y, &P::y_rows>>;

  template <int kForm, class V>
  static RLK_DEVICE void apply(const P& p, const V (&in)[2], V (&out)[1]) {
    const auto a = activations<static_cast<Activation>(kForm)>(in[0]);
    if (p.round_before_mul) {
      out[0] = rounded_product(a, in[1]);
    } else {
      out[0] = each([](auto b, auto u) { return mul_rn(b, u); }, a, in[1]);
    }
  }
};

template <>
struct Elementwise<GatedMulBackwardParams> {
  using P = GatedMulBackwardParams;
  static constexpr const char* kName = "silu_mul_backward";
  static constexpr const char* kArrays[] = {"dy", "gate", "up", "d_gate", "d_up"};
  static constexpr auto kForm = &P::activation;
  using Inputs =
      Arrays<Rows<&P::dy, &P::dy_rows>, Rows<&P::gate, &P::gate_rows>, Rows<&P::up, &P::up_rows, &P::gate_rows>>;
  using Outputs = Arrays<Rows<&P::d_gate, &P::d_gate_rows>, Rows<&P::d_up, &P::d_up_rows, &P::d_gate_rows>>;

  template <int kForm, class V>
  static RLK_DEVICE void apply(const P& p, const V (&in)[3], V (&out)[2]) {
    constexpr bool kHalf = kGainsFromHalves<V>;
    const auto dy = numbers(in[0]);
    const auto r = each(
        [](auto d, auto g, auto u) {
          auto a = activated<static_cast<Activation>(kForm), true, kHalf>(g);
          a.slope = mul_rn(mul_rn(d, u), a.slope);
          return a;
        },
        dy, in[1], in[2]);
    out[0] = each([](auto a) { return a.slope; }, r);
    auto b = each([](auto a) { return a.value; }, r);
    if (p.round_before_mul) b = rounded(b);
    out[1] = each([](auto d, auto x) { return mul_rn(d, x); }, dy, b);
  }
};

}  // namespace rlk
