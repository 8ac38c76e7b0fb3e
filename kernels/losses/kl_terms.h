// Formulas of ops/kl.h, shared by every backend and by the KL term of policy_loss.
#pragma once

#include "kernels/tokens/terms.h"
#include "rlk/math/exp.h"
#include "rlk/math/expm1.h"
#include "rlk/ops/kl.h"

namespace rlk {

// Limits for the estimator k3 if its value is multiplied by a ratio. The limits apply to e = ref_logprob - logprob.
// Above kKlSplit, exp(e) times the ratio is computed as one exponential of a sum. kKlMost is the largest e for which k3
// itself is computed.
constexpr float kKlSplit = 16.0f, kKlMost = 80.0f;

template <class F>
struct KlTerm {
  F value, slope;
};
// The estimator's value K as a function of e = ref_logprob - logprob, and its derivative with respect to e. k3 clamps e
// to at most `most`.
template <class F>
RLK_HD KlTerm<F> kl_along(KlEstimator estimator, F e, float input_limit, float most = kLargestFloat) {
  const F zero = broadcast<F>(0.0f), one = broadcast<F>(1.0f);
  switch (estimator) {
    case KlEstimator::kK2:
      return {mul_rn(mul_rn(broadcast<F>(0.5f), e), e), e};
    case KlEstimator::kK3: {
      if (input_limit <= 20.0f) {
        const F m = expm1_in_range(e);
        return {sub_rn(m, e), m};
      }
      const F h = min_of(e, broadcast<F>(most)), m = expm1(h);  // avoids infinity minus infinity, which is NaN
      return {sub_rn(m, h), m};
    }
    case KlEstimator::kAbs:
      return {abs_of(e), select(e > zero, one, select(e < zero, -one, select(e == zero, zero, e)))};
    default:
      return {-e, -one};
  }
}
// The estimator's value K, before it is multiplied by a ratio and limited.
template <class F>
RLK_HD KlTerm<F> kl_term(KlEstimator estimator, F logprob, F ref_logprob, float input_limit, bool straight_through,
                         float most = kLargestFloat) {
  const F raw = sub_rn(ref_logprob, logprob);
  const KlTerm<F> of = kl_along(estimator, clamped(raw, -input_limit, input_limit), input_limit, most);
  KlTerm<F> k = {of.value, inside_or(raw, -input_limit, input_limit, -of.slope, broadcast<F>(0.0f))};
  if (straight_through) k.slope = -raw;
  return k;
}
// The ratio by which the estimator's value K is multiplied.
template <class F>
struct KlRatio {
  F log, ratio;
  // derivative of the ratio's log with respect to the token's logprob; 0: the ratio does not depend on the logprob
  F share;
  MaskOf<F> of_token;  // whether the ratio's log is exactly logprob - old_logprob, not clamped
};
// K times a ratio, and the product's derivative with respect to the token's logprob, including the ratio's derivative.
// `k` was computed with `most` = kKlMost. kAlone: every share is 1, and the ratio is not clamped.
template <bool kAlone, class F>
RLK_HD KlTerm<F> kl_times_ratio(KlEstimator estimator, bool straight_through, const KlTerm<F>& k, F logprob,
                                F ref_logprob, F old_logprob, float input_limit, const KlRatio<F>& x) {
  const F zero = broadcast<F>(0.0f), one = broadcast<F>(1.0f), largest = broadcast<F>(kLargestFloat), r = x.ratio;
  F value = scaled_by(k.value, r);
  if (estimator != KlEstimator::kK3 || straight_through) {
    const F of_ratio = min_of(k.value, largest);
    return {value, scaled_by(add_rn(kAlone ? of_ratio : mul_rn(x.share, of_ratio), k.slope), r)};
  }
  const F raw = sub_rn(ref_logprob, logprob), e = clamped(raw, -input_limit, input_limit);
  const auto held = MaskOf<F>((e < raw) | (e > raw)), far = MaskOf<F>(e > broadcast<F>(kKlSplit));
  F along = zero;
  if (!kAlone) along = scaled_by(k.slope, r);
  if (any_of(far)) {
    // exp(e) may overflow and r underflow although their product does neither
    const F sum = select(x.log == broadcast<F>(-infinity()), x.log, add_rn(x.log, e));
    const F direct = sub_rn(ref_logprob, old_logprob);
    const F product = exp_where(far, select(held, sum, kAlone ? direct : select(x.of_token, direct, sum)));
    value = select(far, sub_rn(product, min_of(scaled_by(r, add_rn(one, e)), largest)), value);
    if (!kAlone) along = select(held, along, select(far, sub_rn(min_of(r, largest), product), along));
  }
  const F closed = -scaled_by(e, r);
  if (kAlone) return {value, select(held, value, closed)};
  const F shared = sub_rn(closed, scaled_by(sub_rn(one, x.share), value));
  return {value, select(held, scaled_by(x.share, value), select(x.share == zero, along, shared))};
}
// The slope of a limited value. The slope is 0 outside the limit, except with straight_through, which limits only the
// value.
template <class F>
RLK_HD F limited_slope(F value, float limit, F slope, bool straight_through) {
  return straight_through ? slope : inside_or(value, -limit, limit, slope, broadcast<F>(0.0f));
}
template <class F>
RLK_HD KlTerm<F> limited_kl(KlTerm<F> k, float limit, bool straight_through) {
  return {clamped(k.value, -limit, limit), limited_slope(k.value, limit, k.slope, straight_through)};
}

enum KlInput : int { kKlLogprob, kKlRefLogprob, kKlWeight, kKlGradient, kKlInputs };
enum KlOutput : int { kKlValue, kKlOfLogprob, kKlOfWeight, kKlOutputs };

// The pass of kl over tokens, which has no sums. The pass computes K, or the gradients of K if an incoming gradient is
// given.
struct KlTokenTerms : EverySum {
  static constexpr int kInputs = kKlInputs, kOutputs = kKlOutputs, kSums = 0;
  static constexpr bool kMayBePacked = false;
  using Params = KlParams;
  struct Factors {};
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) {
    switch (i) {
      case kKlLogprob:
        return p.logprob;
      case kKlRefLogprob:
        return p.ref_logprob;
      case kKlWeight:
        return p.weight;
      default:
        return p.d_kl;
    }
  }
  static RLK_HD float* output(const Params& p, int i) {
    return i == kKlValue ? p.kl : i == kKlOfLogprob ? p.d_logprob : p.d_importance_weight;
  }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors&, const F (&in)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>*) {
    const KlSpec& s = p.spec;
    const F zero = broadcast<F>(0.0f);
    const bool straight_through = s.straight_through != 0;
    const bool has_ratio = s.weight == KlWeight::kOldLogprob;
    const F l = in[kKlLogprob], f = in[kKlRefLogprob], weight = in[kKlWeight];
    // Written zeros are +0, and written NaNs are canonical.
    const auto written = [&](F x) { return canonical(where(mask, add_rn(x, zero))); };
    KlTerm<F> k = kl_term(s.estimator, l, f, s.input_limit, straight_through, has_ratio ? kKlMost : kLargestFloat);
    out[kKlOfWeight] = zero;
    if (has_ratio) {
      const F x = sub_rn(l, weight);
      k = kl_times_ratio<true>(s.estimator, straight_through, k, l, f, weight, s.input_limit,
                               {x, exp(x), broadcast<F>(1.0f), MaskOf<F>(zero == zero)});
    } else if (s.weight == KlWeight::kImportance) {
      const F product = scaled_by(k.value, weight),
              of_weight = limited_slope(product, s.limit, k.value, straight_through);
      out[kKlOfWeight] = written(scaled_by(of_weight, in[kKlGradient]));
      k = {product, scaled_by(k.slope, weight)};
    }
    k = limited_kl(k, s.limit, straight_through);
    out[kKlValue] = written(k.value);
    out[kKlOfLogprob] = written(scaled_by(k.slope, in[kKlGradient]));
  }
};

}  // namespace rlk
