// PPO's clip of a token's ratio with the options that most configurations use. The code for all other options is left
// out. Results have the same bits as those of policy_terms.h.
#pragma once

#include "kernels/losses/policy_terms.h"
#include "kernels/tokens/plain.h"

namespace rlk {

struct PlainPolicyTerms {
  static constexpr bool kOfSequence = false;
  static constexpr int kInputs = kInputRefLogprob + 1, kFirstOptional = kInputRefLogprob;
  static constexpr int kShareable = kInputAdvantage, kCounts = 4;
  static constexpr int kSums = kPolicySums;
  using Params = PolicyLossParams;
  using Factors = PolicyFactors;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return policy_input(p, i); }
  static RLK_HD float* output(const Params& p) { return p.d_logprob; }
  static RLK_HD float upper_sum(int i, std::uint32_t tokens) {
    return PolicyTokenTerms<PolicyForm::kClipped>::upper_sum(i, tokens);
  }

  template <class F, class Count>
  static RLK_HD void token(const Params& p, const Factors& f, const F (&in)[kInputs], MaskOf<F> mask, F* d_logprob,
                           PlainSums<F>* sums, const Count& count) {
    const PolicySpec& s = p.spec;
    const F zero = broadcast<F>(0.0f);
    const F raw = where(mask, sub_rn(in[kInputLogprob], in[kInputOldLogprob]));
    const float kl_coef = s.kl != KlEstimator::kNone ? s.kl_coef : 0.0f;
    F kl = zero, of_kl = zero;
    if (s.kl != KlEstimator::kNone) {
      const F e = where(mask, sub_rn(in[kInputRefLogprob], in[kInputLogprob]));
      const F limited = clamped(e, -s.kl_input_limit, s.kl_input_limit);
      const KlTerm<F> k = kl_along(s.kl, limited, s.kl_input_limit);
      kl = clamped(k.value, -s.kl_limit, s.kl_limit);
      if (kl_coef != 0.0f) of_kl = select(is_apart(limited, e) | is_apart(kl, k.value), zero, k.slope);
    }
    const Ratio<F> x = ratio_of(s, raw);
    const F a = where(mask, in[kInputAdvantage]), minus = -a;
    const F r = x.ratio, p2 = mul_rn(minus, clamped(r, s.clip_low, s.clip_high));
    // p2 needs no limit for zero times infinity: r is then 0, and p2 does not exceed p1, which is 0.
    const F p1 = scaled_by(minus, select(a == zero, zero, r)), p3 = mul_rn(minus, broadcast<F>(s.dual_clip));
    // Each condition is counted as soon as it is computed, so registers hold few conditions at a time.
    const auto clipped = p2 > p1;
    count(kCountClipped, clipped);
    // p1 is the unclipped term and p2 the clipped term. If p2 exceeds p1, the ratio is outside its bounds, and p2 does
    // not depend on the ratio. Otherwise p1 is also the slope; it is NaN if the advantage is.
    const F along = select((is_apart(x.log_ratio, raw) & (a == a)) | clipped, zero, p1);
    F value = select(clipped, p2, p1);
    const auto negative = a < zero;
    count(kCountLow, (r < broadcast<F>(s.clip_low)) & negative);
    const auto dual = negative & (value > p3);
    count(kCountDual, dual);
    value = select(dual, p3, value);
    const F slope = add_rn(select(dual, zero, along), zero);
    count(kCountHigh, (r > broadcast<F>(s.clip_high)) & (a > zero));
    const F along_logprob = fma_rn(broadcast<F>(kl_coef), -of_kl, slope);
    *d_logprob =
        either(f.weight == 0.0f, zero, canonical_product(where(mask, mul_rn(broadcast<F>(f.weight), along_logprob))));
    sums->sum[kSumPolicy] = value;
    sums->sum[kSumKl] = kl;
    sums->sum[kSumPpoKl] = -x.log_ratio;
    sums->sum[kSumRatio] = sums->maximum = where(mask, r);
  }
};
static_assert(kCountClipped == 1 && kCountHigh == PlainPolicyTerms::kCounts);

inline bool is_plain(const PolicyLossParams& p) {
  const PolicySpec& s = p.spec;
  return form_of(p) == PolicyForm::kClipped && s.ratio_cap == infinity() && s.clip_high > 0.0f &&
         p.entropy.data == nullptr && p.d_entropy == nullptr && s.kl_straight_through == 0 && s.kl_times_ratio == 0 &&
         s.kl_gradient_ratio == 0.0f && has_plain_arrays<PlainPolicyTerms>(p);
}

}  // namespace rlk
