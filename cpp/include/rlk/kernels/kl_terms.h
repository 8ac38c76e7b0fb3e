// The formulas of ops/kl.h that every backend shares, and policy_loss has for its KL term.
#pragma once

#include "rlk/kernels/token_terms.h"
#include "rlk/math/exp.h"
#include "rlk/math/expm1.h"
#include "rlk/ops/kl.h"

namespace rlk {

template <class F>
struct KlTerm {
  F value, slope;
};
// K of e alone, and its slope along e.
template <class F>
RLK_HD KlTerm<F> kl_along(KlEstimator estimator, F e, float input_limit) {
  const F zero = broadcast<F>(0.0f), one = broadcast<F>(1.0f);
  switch (estimator) {
    case KlEstimator::kK2:
      return {mul_rn(mul_rn(broadcast<F>(0.5f), e), e), e};
    case KlEstimator::kK3: {
      F m;
      if (input_limit <= 20.0f) {
        m = expm1_in_range(e);
      } else {
        m = expm1(e);
      }
      return {sub_rn(m, e), m};
    }
    case KlEstimator::kAbs:
      return {abs_of(e), select(e > zero, one, select(e < zero, -one, zero))};
    default:
      return {-e, -one};
  }
}
// Before any product with the ratio and any limit of the result.
template <class F>
RLK_HD KlTerm<F> kl_term(KlEstimator estimator, F logprob, F ref_logprob, float input_limit, bool straight_through) {
  const F raw = sub_rn(ref_logprob, logprob);
  const KlTerm<F> of = kl_along(estimator, clamped(raw, -input_limit, input_limit), input_limit);
  KlTerm<F> k = {of.value, inside_or(raw, -input_limit, input_limit, -of.slope, broadcast<F>(0.0f))};
  if (straight_through) k.slope = -raw;
  return k;
}
// Where a slope is not that of its value, the limit is the value's alone.
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

// One pass over tokens, without sums: values, or, given what they are multiplied by, gradients.
struct KlTokenTerms : EverySum {
  static constexpr int kInputs = kKlInputs, kOutputs = kKlOutputs, kSums = 0;
  using Params = KlParams;
  struct Factors {};
  static RLK_HD const PolicySequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const PolicyMask& mask(const Params& p) { return p.mask; }
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
    const KlTerm<F> plain = kl_term(s.estimator, in[kKlLogprob], in[kKlRefLogprob], s.input_limit, straight_through);
    KlTerm<F> k = plain;
    if (s.weight == KlWeight::kOldLogprob) {
      const F r = exp(sub_rn(in[kKlLogprob], in[kKlWeight]));
      k = {mul_rn(k.value, r), fma_rn(k.value, r, mul_rn(k.slope, r))};
    } else if (s.weight == KlWeight::kImportance) {
      k = {mul_rn(k.value, in[kKlWeight]), mul_rn(k.slope, in[kKlWeight])};
    }
    const F of_weight = limited_slope(k.value, s.limit, plain.value, straight_through);
    k = limited_kl(k, s.limit, straight_through);
    // No zero has a sign, and no NaN a payload.
    const auto written = [&](F x) { return canonical(where(mask, add_rn(x, zero))); };
    out[kKlValue] = written(k.value);
    out[kKlOfLogprob] = written(mul_rn(in[kKlGradient], k.slope));
    out[kKlOfWeight] = written(mul_rn(in[kKlGradient], of_weight));
  }
};

}  // namespace rlk
