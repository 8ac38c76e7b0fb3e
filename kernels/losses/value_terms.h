// The formulas of ops/value_loss.h that every backend shares.
#pragma once

#include "kernels/tokens/central_moments.h"
#include "kernels/tokens/results.h"
#include "kernels/tokens/terms.h"
#include "kernels/tokens/weights.h"
#include "rlk/ops/value_loss.h"

namespace rlk {

enum ValueInput : int { kInputValue, kInputOldValue, kInputReturns, kInputValueWeight, kValueInputs };
enum ValueSum : int {
  kSumValueLoss,
  kSumValue,
  kSumReturn,
  kSumError,
  kSumErrorSquared,
  kSumReturnSquared,
  kValueSums
};
enum ValueCount : int { kCountValueClipped = kCountTokens + 1, kCountOutside };

RLK_HD bool needs_totals(const ValueLossParams& p) { return counts_denominator(p); }
RLK_HD bool needs_counts(const ValueLossParams& p) { return p.spec.sequence_mean != 0 || needs_totals(p); }
struct ValueFactors {  // factors for the tokens of one sequence
  std::int64_t tokens = 0;
  float weight = 0.0f;
};
RLK_HD void set_weights(const ValueLossParams& p, const PolicyTotals& totals, std::int64_t n, ValueFactors* f) {
  f->weight = token_weight(p, totals, n);
}

// The first pass, which runs only if the weights depend on numbers of tokens.
struct ValueStatisticsTerms : LowerSums {
  static constexpr int kInputs = 1, kOutputs = 1, kSums = 8;
  using Params = ValueLossParams;
  using Factors = ValueFactors;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params&, int) { return {}; }
  static RLK_HD float* output(const Params&, int) { return nullptr; }

  template <class F>
  static RLK_HD void token(const Params&, const Factors&, const F (&)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>* sums) {
    out[0] = broadcast<F>(0.0f);
    clear(sums);
    sums->count[kCountTokens] = counted<F>(mask);
  }
};

struct ValueTokenTerms : EverySum {
  enum : int { kMostError, kMostReturn };
  static constexpr bool kOfSequence = false;
  static constexpr int kInputs = kValueInputs, kOutputs = 1, kSums = 8;
  using Params = ValueLossParams;
  using Factors = ValueFactors;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) {
    switch (i) {
      case kInputValue:
        return p.value;
      case kInputOldValue:
        return p.old_value;
      case kInputReturns:
        return p.returns;
      default:
        return p.token_weight;
    }
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
    F loss = select(MaskOf<F>(clipped | is_nan(of_w)), of_w, of_v);
    if (p.token_weight.data != nullptr) {
      slope = scaled_by(slope, in[kInputValueWeight]);
      loss = scaled_by(loss, in[kInputValueWeight]);
    }
    out[0] = canonical(where(mask, weighted(f.weight, slope)));

    clear(sums);  // inputs of a masked token are 0, so its terms are 0
    sums->sum[kSumValueLoss] = loss;
    sums->sum[kSumValue] = v;
    sums->sum[kSumReturn] = r;
    sums->sum[kSumError] = error;
    sums->sum[kSumErrorSquared] = mul_rn(error, error);
    sums->sum[kSumReturnSquared] = mul_rn(r, r);
    sums->maximum[kMostError] = abs_of(error);
    sums->maximum[kMostReturn] = abs_of(r);
    sums->count[kCountTokens] = counted<F>(mask);
    sums->count[kCountValueClipped] = counted<F>(mask & clipped);
    sums->count[kCountOutside] = counted<F>(mask & outside);
  }
};

// What a sequence adds to the sums over sequences: its sums over tokens, and then its weighted loss.
constexpr int kWeightedValue = kValueSums;
using ValueTotalSums = TotalSums<kValueSums + 1, kLossCounts, 2>;

// The loss is stored after the metrics.
constexpr int kValueResults = kValueMetrics + 1;
struct ValueResults {
  static constexpr ResultSources<kValueResults> sources() {
    using Of = ResultOf;
    constexpr auto kMean = ResultOver::kTokens;
    ResultSources<kValueResults> from;
    from.set(kValueMetricLoss, Of::kSum, kWeightedValue);
    from.set(kValueMetricNumTokens, Of::kCount, kCountTokens);
    from.set(kValueMetricNumSequences, Of::kCount, kCountSequences);
    from.set(kValueMetricLossSum, Of::kSum, kSumValueLoss);
    from.set(kValueMetricValueSum, Of::kSum, kSumValue);
    from.set(kValueMetricReturnSum, Of::kSum, kSumReturn);
    from.set(kValueMetricErrorSum, Of::kSum, kSumError);
    from.set(kValueMetricErrorSquaredSum, Of::kSum, kSumErrorSquared);
    from.set(kValueMetricReturnSquaredSum, Of::kSum, kSumReturnSquared);
    from.set(kValueMetricClipFraction, Of::kCount, kCountValueClipped, kMean);
    from.set(kValueMetricOutsideFraction, Of::kCount, kCountOutside, kMean);
    from.set(kValueMetricValueMean, Of::kSum, kSumValue, kMean);
    from.set(kValueMetricReturnMean, Of::kSum, kSumReturn, kMean);
    from.set(kValueMetrics, Of::kSum, kWeightedValue);
    return from;
  }
};

struct ValueShared : PolicyTotals {
  CentralPair pair;  // the mean and scale of the errors, and of the returns
};
RLK_HD void store_result(const ValueLossParams& p, const PolicyTotals& totals, const ValueTotalSums& t, int i,
                         ValueShared* shared) {
  float* const to = i == kValueMetrics ? p.loss : p.metrics;
  if (to == nullptr) return;
  const float tokens = static_cast<float>(t.count[kCountTokens]);
  // the pass over central moments computes this metric from the pair stored here
  if (i == kValueMetricExplainedVariance) {
    in_global(shared)->pair = {{central_point(t.sum[kSumError], tokens, t.maximum[ValueTokenTerms::kMostError]),
                                central_point(t.sum[kSumReturn], tokens, t.maximum[ValueTokenTerms::kMostReturn])}};
    return;
  }
  Quotient q = result_of(source_of<ValueResults>(i), t, tokens, 0.0f);
  if (i == kValueMetricDenominator) q = {denominator_of(p, totals), 1.0f};
  if ((i == kValueMetricLoss || i == kValueMetrics) && t.count[kCountBadCuts] > 0) q.n = canonical_nan();
  in_global(to)[i == kValueMetrics ? 0 : i] = q.value();
}

struct ValueBatch : LossBatch<ValueLossParams, ValueFactors> {
  static constexpr int kSums = kValueSums + 1, kMaxima = 2, kResults = kValueResults;
  using Shared = ValueShared;
  using Context = TokenContext<ValueBatch>;
  using Statistics = ValueStatisticsTerms;
  static RLK_HD Factors factors_of(const Params&, std::int64_t, const SequenceSums<8>& of) {
    Factors f;
    f.tokens = of.count[kCountTokens];
    return f;
  }
  static RLK_HD ValueTotalSums missing() { return {}; }
  static RLK_HD ValueTotalSums of_sequence(const Params& p, const Context& context, std::int64_t s,
                                           const SequenceSums<8> (&groups)[kGroups]) {
    const SequenceSums<8>& of = groups[0];
    ValueTotalSums t = {};
    for (int i = 0; i < kValueSums; ++i) t.sum[i] = of.sum[i];
    for (int i = 0; i < kMaxima; ++i) t.maximum[i] = of.maximum[i];
    count(p, s, of, &t);
    const float weight = token_weight(p, totals_of(p, context), of.count[kCountTokens]);
    t.sum[kWeightedValue] = weighted(weight, of.sum[kSumValueLoss]);
    return t;
  }
  static RLK_HD void store(const Params& p, const Context& context, const ValueTotalSums& t, int i) {
    store_result(p, totals_of(p, context), t, i, context.shared);
  }
};

// Computes a metric from the moments of errors and returns.
struct ValueMoments {
  static constexpr int kInputs = 2, kResults = 1;
  static constexpr bool kProducts = false;
  using Batch = ValueBatch;
  using Params = ValueLossParams;
  using Pair = CentralPair;
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == 0 ? p.value : p.returns; }
  template <class F>
  static RLK_HD void values(const Pair&, const F (&in)[kInputs], F (&values)[2]) {
    values[0] = sub_rn(in[1], in[0]);
    values[1] = in[1];
  }
  template <class Total>
  static RLK_HD void of_sequence(const Pair&, const SequenceSums<8>&, Total*) {}
  static RLK_HD int metric(int) { return kValueMetricExplainedVariance; }
  template <class Total>
  static RLK_HD float result(const Pair& pair, const Total& t, int) {
    const float of_errors = central_square(t, 0), of_returns = central_square(t, 1);
    if (of_returns == 0.0f) return 0.0f;
    if (of_errors == 0.0f && !is_nan(of_returns)) return 1.0f;
    const float unit = mul_rn(pair.of[0].unit(), inverse_of(pair.of[1].unit()));
    return sub_rn(1.0f, mul_rn(mul_rn(div_rn(of_errors, of_returns), unit), unit));
  }
};
using ValueMomentsBatch = CentralBatch<ValueMoments>;

}  // namespace rlk
