// policy_loss over sequences and over the batch: a sequence's sums over its tokens, and the results of the batch.
// policy_terms.h has the formulas for tokens.
#pragma once

#include "kernels/losses/policy_terms.h"
#include "kernels/tokens/results.h"

namespace rlk {

// What is summed over sequences: a sequence's sums over its tokens, and three of these sums again, multiplied by the
// weights of the loss.
constexpr int kPolicyTotalSums = kPolicySums + 3;
enum : int { kWeightedPolicy = kPolicySums, kWeightedKl, kWeightedEntropy };
using PolicyTotalSums = TotalSums<kPolicyTotalSums, kLossCounts, kPolicyMaxima>;

// The loss is stored after the metrics.
constexpr int kPolicyResults = kPolicyMetrics + 1;
struct PolicyResults {
  static constexpr ResultSources<kPolicyResults> sources() {
    using Of = ResultOf;
    constexpr auto kMean = ResultOver::kTokens;
    ResultSources<kPolicyResults> from;
    from.set(kPolicyMetricPolicyLoss, Of::kSum, kWeightedPolicy);
    from.set(kPolicyMetricKlLoss, Of::kSum, kWeightedKl);
    from.set(kPolicyMetricEntropyLoss, Of::kSum, kWeightedEntropy);
    from.set(kPolicyMetricNumTokens, Of::kCount, kCountTokens);
    from.set(kPolicyMetricNumSequences, Of::kCount, kCountSequences);
    from.set(kPolicyMetricPolicySum, Of::kSum, kSumPolicy);
    from.set(kPolicyMetricKlSum, Of::kSum, kSumKl);
    from.set(kPolicyMetricEntropySum, Of::kSum, kSumEntropy);
    from.set(kPolicyMetricClipFraction, Of::kCount, kCountClipped, kMean);
    from.set(kPolicyMetricClipFractionDual, Of::kCount, kCountDual, kMean);
    from.set(kPolicyMetricClipFractionLow, Of::kCount, kCountLow, kMean);
    from.set(kPolicyMetricClipFractionHigh, Of::kCount, kCountHigh, kMean);
    from.set(kPolicyMetricPpoKl, Of::kSum, kSumPpoKl, kMean);
    from.set(kPolicyMetricKl, Of::kSum, kSumKl, kMean);
    from.set(kPolicyMetricEntropy, Of::kSum, kSumEntropy, kMean);
    from.set(kPolicyMetricRatioMean, Of::kSum, kSumRatio, kMean);
    from.set(kPolicyMetricRatioMax, Of::kMaximum, 0);
    from.set(kPolicyMetricImportanceMean, Of::kSum, kSumImportance, kMean);
    from.set(kPolicyMetricImportanceMax, Of::kMaximum, 2);
    from.set(kPolicyMetricImportanceClipFraction, Of::kCount, kCountImportance, kMean);
    from.set(kPolicyMetricImportanceEss, Of::kSum, kSumImportance, kMean);
    from.set(kPolicyMetricMismatchMean, Of::kSum, kSumMismatch, kMean);
    from.set(kPolicyMetricMismatchMax, Of::kMaximum, 1);
    return from;
  }
};

RLK_HD float loss_of(const PolicyLossParams& p, const PolicyTotalSums& t) {
  float loss = t.sum[kWeightedPolicy];
  if (p.spec.kl != KlEstimator::kNone && p.spec.kl_coef != 0.0f)
    loss = fma_rn(p.spec.kl_coef, t.sum[kWeightedKl], loss);
  if (p.entropy.data != nullptr && p.spec.entropy_coef != 0.0f)
    loss = fma_rn(-p.spec.entropy_coef, t.sum[kWeightedEntropy], loss);
  return t.count[kCountBadCuts] > 0 ? canonical_nan() : loss;
}
RLK_HD void store_result(const PolicyLossParams& p, const PolicyTotals& totals, const PolicyTotalSums& t, int i) {
  float* const to = i == kPolicyMetrics ? p.loss : p.metrics;
  if (to == nullptr) return;
  const float tokens = static_cast<float>(t.count[kCountTokens]);
  Quotient q = result_of(source_of<PolicyResults>(i), t, tokens, 0.0f);
  if (i == kPolicyMetricLoss || i == kPolicyMetrics) q = {loss_of(p, t), 1.0f};
  if (i == kPolicyMetricDenominator) q = {denominator_of(p, totals), 1.0f};
  if (i == kPolicyMetricImportanceMax && !has_importance(p.spec)) q.n = tokens > 0.0f ? 1.0f : 0.0f;
  if (i == kPolicyMetricImportanceEss) q.n = quotient_or_zero(mul_rn(q.n, q.n), t.sum[kSumImportanceSquared]);
  in_global(to)[i == kPolicyMetrics ? 0 : i] = q.value();
}

struct PolicyBatch : LossBatch<PolicyLossParams, PolicyFactors> {
  static constexpr int kSums = kPolicyTotalSums, kMaxima = kPolicyMaxima, kResults = kPolicyResults;
  using Statistics = PolicyStatisticsTerms;
  static RLK_HD bool counts_alone(const Params& p) { return !needs_statistics(p.spec); }
  static RLK_HD Factors factors_of(const Params& p, std::int64_t, const SequenceSums<8>& of) {
    return policy_factors(p, of);
  }
  static RLK_HD PolicyTotalSums missing() { return {}; }
  template <class Context>
  static RLK_HD PolicyTotalSums of_sequence(const Params& p, const Context& context, std::int64_t s,
                                            const SequenceSums<8> (&groups)[kGroups]) {
    const SequenceSums<8>& of = groups[0];
    PolicyTotalSums t;
    for (int i = 0; i < kPolicySums; ++i) t.sum[i] = of.sum[i];
    for (int i = 0; i < kPolicyMaxima; ++i) t.maximum[i] = of.maximum[i];
    count(p, s, of, &t);
    PolicyFactors f;
    set_weights(p, totals_of(p, context), of.count[kCountTokens], &f);
    t.sum[kWeightedPolicy] = weighted(f.weight, of.sum[kSumPolicy]);
    t.sum[kWeightedKl] = weighted(f.weight, of.sum[kSumKl]);
    t.sum[kWeightedEntropy] = weighted(f.entropy_weight, of.sum[kSumEntropy]);
    return t;
  }
  template <class Context>
  static RLK_HD void store(const Params& p, const Context& context, const PolicyTotalSums& t, int i) {
    store_result(p, totals_of(p, context), t, i);
  }
};

}  // namespace rlk
