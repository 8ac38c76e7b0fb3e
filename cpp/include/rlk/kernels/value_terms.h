// The formulas of ops/value_loss.h that every backend shares. Passes, partial results and sums over sequences are those of
// policy_loss.
#pragma once

#include "rlk/kernels/policy_terms.h"
#include "rlk/ops/value_loss.h"

namespace rlk {

enum ValueInput : int { kInputValue, kInputOldValue, kInputReturns, kValueInputs };
enum ValueSum : int {
  kSumValueLoss,
  kSumValue,
  kSumReturn,
  kSumError,
  kSumErrorSquared,
  kSumReturnSquared,
  kValueSums
};
constexpr int kCountOutside = kCountClipped + 1;
static_assert(static_cast<int>(kValueSums) <= static_cast<int>(kPolicySums) && kCountOutside < kTokenCounts);

RLK_HD bool needs_totals(const ValueLossParams& p) { return counts_denominator(p); }
RLK_HD bool needs_counts(const ValueLossParams& p) { return p.spec.sequence_mean != 0 || needs_totals(p); }
RLK_HD void set_weights(const ValueLossParams& p, const PolicyTotals& totals, std::int64_t n, PolicyFactors* f) {
  f->weight = token_weight(p, totals, n);
}
RLK_HD PolicyFactors policy_factors(const ValueLossParams& p, const PolicyTotals& totals,
                                    const SequenceSums<kPolicyStatistics>& of) {
  PolicyFactors f;
  f.tokens = of.count[kCountTokens];
  set_weights(p, totals, f.tokens, &f);
  return f;
}

template <class F, int kSums>
RLK_HD void clear(TokenSums<F, kSums>* sums) {
  const F zero = broadcast<F>(0.0f);
  RLK_UNROLL
  for (F& sum : sums->sum) sum = zero;
  RLK_UNROLL
  for (F& m : sums->maximum) m = zero;
  RLK_UNROLL
  for (auto& c : sums->count) c = MaskOf<F>(zero > zero);
}

// The pass before, where weights need numbers of tokens.
struct ValueStatisticsTerms {
  static constexpr int kInputs = 1, kOutputs = 1, kSums = kPolicyStatistics;
  using Params = ValueLossParams;
  using Factors = PolicyFactors;
  static RLK_HD const PolicySequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const PolicyMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params&, int) { return {}; }
  static RLK_HD float* output(const Params&, int) { return nullptr; }

  template <class F>
  static RLK_HD void token(const Params&, const Factors&, const F (&)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>* sums) {
    out[0] = broadcast<F>(0.0f);
    clear(sums);
    sums->count[kCountTokens] = mask;
  }
};

struct ValueTokenTerms {
  static constexpr bool kOfSequence = false;
  static constexpr int kInputs = kValueInputs, kOutputs = 1, kSums = kPolicySums;
  using Params = ValueLossParams;
  using Factors = PolicyFactors;
  static RLK_HD const PolicySequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const PolicyMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) {
    return i == kInputValue ? p.value : i == kInputOldValue ? p.old_value : p.returns;
  }
  static RLK_HD float* output(const Params& p, int) { return p.d_value; }

  template <class F>
  static RLK_HD F error_of(F x, float huber) {
    const F half = broadcast<F>(0.5f), b = broadcast<F>(huber), size = abs_of(x);
    const F linear = mul_rn(b, sub_rn(size, broadcast<F>(0.5f * huber)));
    return select(size > b, linear, mul_rn(mul_rn(half, x), x));
  }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors& f, const F (&in)[kInputs], MaskOf<F> mask,
                           F (&out)[kOutputs], TokenSums<F, kSums>* sums) {
    const F zero = broadcast<F>(0.0f), clip = broadcast<F>(p.spec.clip);
    const F v = in[kInputValue], o = in[kInputOldValue], r = in[kInputReturns];
    const F low = sub_rn(o, clip), high = add_rn(o, clip);
    const auto below = v<low, above = v> high;
    const F w = select(is_nan(o), o, select(below, low, select(above, high, v)));
    const F x = sub_rn(v, r), of_v = error_of(x, p.spec.huber), of_w = error_of(sub_rn(w, r), p.spec.huber);
    const auto outside = MaskOf<F>(below | above), clipped = MaskOf<F>((of_w > of_v) & outside);
    const F whole = clamped(x, -p.spec.huber, p.spec.huber);
    F slope = select(MaskOf<F>(outside & (of_w == of_v)), mul_rn(broadcast<F>(0.5f), whole), whole);
    slope = select(is_nan(of_w), of_w, select(clipped, zero, slope));
    const F error = sub_rn(r, v);
    out[0] = canonical(select(mask, mul_rn(broadcast<F>(f.weight), slope), zero));

    clear(sums);  // inputs of a masked token are 0, and so are its terms
    sums->sum[kSumValueLoss] = select(MaskOf<F>(clipped | is_nan(of_w)), of_w, of_v);
    sums->sum[kSumValue] = v;
    sums->sum[kSumReturn] = r;
    sums->sum[kSumError] = error;
    sums->sum[kSumErrorSquared] = mul_rn(error, error);
    sums->sum[kSumReturnSquared] = mul_rn(r, r);
    sums->count[kCountTokens] = mask;
    sums->count[kCountClipped] = mask & clipped;
    sums->count[kCountOutside] = mask & outside;
  }
};

RLK_HD PolicyTotalSums total_of(const ValueLossParams& p, const PolicyTotals& totals, std::int64_t s,
                                const SequenceSums<kPolicySums>& of) {
  PolicyTotalSums t = {};
  for (int i = 0; i < kPolicySums; ++i) t.sum[i] = of.sum[i];
  for (int i = 0; i < kTokenCounts; ++i) t.count[i] = of.count[i];
  t.sum[kWeightedPolicy] = mul_rn(token_weight(p, totals, of.count[kCountTokens]), of.sum[kSumValueLoss]);
  t.count[kCountSequences] = of.count[kCountTokens] > 0;
  t.count[kCountBadCuts] = p.sequences.packed() && !are_cuts_good(p.sequences, s);
  return t;
}

RLK_HD void store_results(const ValueLossParams& p, const PolicyTotals& totals, const PolicyTotalSums& t) {
  const float tokens = static_cast<float>(t.count[kCountTokens]);
  const float loss = t.count[kCountBadCuts] > 0 ? canonical_nan() : finished_sum(t.sum[kWeightedPolicy]);
  if (p.loss != nullptr) *in_global(p.loss) = loss;
  if (p.metrics == nullptr) return;
  const auto mean = [&](float sum) { return quotient_or_zero(sum, tokens); };
  const auto variance = [&](int sum, int squares) {
    const float m = mean(t.sum[sum]);
    return fma_rn(-m, m, mean(t.sum[squares]));
  };
  const float of_errors = variance(kSumError, kSumErrorSquared), of_returns = variance(kSumReturn, kSumReturnSquared);
  float* const to = in_global(p.metrics);
  to[kValueMetricLoss] = loss;
  to[kValueMetricNumTokens] = tokens;
  to[kValueMetricNumSequences] = static_cast<float>(t.count[kCountSequences]);
  to[kValueMetricDenominator] = finished_sum(denominator_of(p, totals));
  to[kValueMetricLossSum] = finished_sum(t.sum[kSumValueLoss]);
  to[kValueMetricValueSum] = finished_sum(t.sum[kSumValue]);
  to[kValueMetricReturnSum] = finished_sum(t.sum[kSumReturn]);
  to[kValueMetricErrorSum] = finished_sum(t.sum[kSumError]);
  to[kValueMetricErrorSquaredSum] = finished_sum(t.sum[kSumErrorSquared]);
  to[kValueMetricReturnSquaredSum] = finished_sum(t.sum[kSumReturnSquared]);
  to[kValueMetricClipFraction] = mean(static_cast<float>(t.count[kCountClipped]));
  to[kValueMetricOutsideFraction] = mean(static_cast<float>(t.count[kCountOutside]));
  to[kValueMetricValueMean] = finished_sum(mean(t.sum[kSumValue]));
  to[kValueMetricReturnMean] = finished_sum(mean(t.sum[kSumReturn]));
  to[kValueMetricExplainedVariance] =
      of_returns <= 0.0f ? 0.0f : finished_sum(sub_rn(1.0f, div_rn(of_errors, of_returns)));
}

}  // namespace rlk
