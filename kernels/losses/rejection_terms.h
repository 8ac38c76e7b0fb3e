// The formulas of ops/importance_weights.h that every backend shares, and the checks for memory safety.
#pragma once

#include "kernels/losses/importance_terms.h"
#include "kernels/losses/policy_check.h"
#include "kernels/tokens/central_moments.h"
#include "kernels/tokens/results.h"
#include "rlk/math/expm1.h"
#include "rlk/ops/importance_weights.h"

namespace rlk {

inline void check_importance_weights(const ImportanceWeightsParams& p) {
  check_sequences(p.sequences, p.mask, "importance_weights");
  const ImportanceSpec& s = p.spec;
  RLK_CHECK(s.level == ImportanceLevel::kToken || s.level == ImportanceLevel::kSequence ||
                s.level == ImportanceLevel::kGeometric,
            "importance_weights: level is kToken, kSequence or kGeometric");
  RLK_CHECK(s.limit > 0.0f, "importance_weights: limit is positive");
  RLK_CHECK(s.low <= s.high, "importance_weights: low is not above high");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.logprob.data && p.logprob.token_stride == 1, "importance_weights: logprob, one a token");
  RLK_CHECK(p.rollout_logprob.data && p.rollout_logprob.token_stride == 1,
            "importance_weights: rollout_logprob, one a token");
  RLK_CHECK(p.weights != nullptr && p.kept != nullptr, "importance_weights: weights and kept are given");
}

constexpr float kLeastMeanWeight = 1e-8f;

RLK_HD ImportanceBounds importance_bounds(const ImportanceSpec& s) {
  return {s.low, s.high, s.limit, s.zero_outside != 0};
}
RLK_HD bool rejects(const RejectionBounds& b) {
  return b.k1_low > -infinity() || b.k1_high < infinity() || b.k2 < infinity() || b.k3 < infinity();
}
RLK_HD bool vetoes(const ImportanceSpec& s) { return s.veto_below > -infinity(); }
// Whether a token needs sums over its sequence.
RLK_HD bool needs_statistics(const ImportanceSpec& s) {
  return s.level != ImportanceLevel::kToken || rejects(s.sum) || rejects(s.mean) || rejects(s.most) || vetoes(s);
}

template <class F>
struct Divergence {
  F k1, k2, k3;
};
template <class F>
RLK_HD Divergence<F> divergence_of(F c) {
  const F k3 = sub_rn(expm1(c), min_of(c, broadcast<F>(kLargestFloat)));
  return {-c, mul_rn(mul_rn(broadcast<F>(0.5f), c), c), max_of(k3, broadcast<F>(0.0f))};
}
// The tokens of the mask `kept` that also pass every bound that is given.
template <class F>
RLK_HD MaskOf<F> inside(const RejectionBounds& b, const Divergence<F>& k, MaskOf<F> kept) {
  if (b.k1_low > -infinity()) kept = MaskOf<F>(kept & (k.k1 >= broadcast<F>(b.k1_low)));
  if (b.k1_high < infinity()) kept = MaskOf<F>(kept & (k.k1 <= broadcast<F>(b.k1_high)));
  if (b.k2 < infinity()) kept = MaskOf<F>(kept & (k.k2 <= broadcast<F>(b.k2)));
  if (b.k3 < infinity()) kept = MaskOf<F>(kept & (k.k3 <= broadcast<F>(b.k3)));
  return kept;
}

// Factors that a sequence's tokens share.
struct ImportanceFactors {
  float weight = 0.0f, ratio = 0.0f;  // weight: after the bounds; ratio: before the bounds
  std::int32_t kept = 1;
  std::int32_t broken = 0;  // the sequence's offsets are bad
};

enum : int { kStatOfRatio, kStatOfLimited, kStatK2, kStatK3 };
enum : int { kStatTokens, kStatAboveVeto };

struct ImportanceStatisticsTerms : LowerSums {
  static constexpr int kInputs = 2, kOutputs = 1, kSums = 8;
  struct Factors {};
  using Params = ImportanceWeightsParams;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == 0 ? p.logprob : p.rollout_logprob; }
  static RLK_HD float* output(const Params&, int) { return nullptr; }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors&, const F (&in)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>* sums) {
    const F zero = broadcast<F>(0.0f), d = rollout_log_ratio(p.spec.rollout_neutral != 0, in[0], in[1], in[1]);
    const F c = clamped(d, -p.spec.limit, p.spec.limit);
    const Divergence<F> k = divergence_of(c);  // for a masked token d is 0, so the divergence is 0
    out[0] = zero;
    clear(sums);
    sums->sum[kStatOfRatio] = d;
    sums->sum[kStatOfLimited] = c;
    sums->sum[kStatK2] = k.k2;
    sums->sum[kStatK3] = k.k3;
    sums->count[kStatTokens] = counted<F>(mask);
    sums->count[kStatAboveVeto] = counted<F>(MaskOf<F>(mask & (d >= broadcast<F>(p.spec.veto_below))));
    sums->maximum[0] = k.k2;
    sums->maximum[1] = k.k3;
  }
};

RLK_HD ImportanceFactors importance_factors(const ImportanceWeightsParams& p, std::int64_t sequence,
                                            const SequenceSums<8>& of) {
  const ImportanceSpec& s = p.spec;
  const std::int64_t tokens = of.count[kStatTokens];
  ImportanceFactors f;
  f.broken = has_bad_offsets(p.sequences, sequence);
  if (tokens == 0) return f;
  const float n = static_cast<float>(tokens), d = of.sum[kStatOfRatio];
  if (s.level != ImportanceLevel::kToken) {
    const float z = s.level == ImportanceLevel::kSequence ? d : div_rn(d, n);
    f.ratio = exp(clamped(z, -s.limit, s.limit));
    f.weight = limited_weight(importance_bounds(s), f.ratio).weight;
  }
  const Divergence<float> sum = {-of.sum[kStatOfLimited], of.sum[kStatK2], of.sum[kStatK3]};
  bool kept = !vetoes(s) || of.count[kStatAboveVeto] == tokens;
  kept = inside(s.sum, sum, kept);
  kept = inside<float>(s.mean, {div_rn(sum.k1, n), div_rn(sum.k2, n), div_rn(sum.k3, n)}, kept);
  kept = inside<float>(s.most, {0.0f, of.maximum[0], of.maximum[1]}, kept);
  f.kept = kept;
  return f;
}

enum : int { kSumWeight, kSumDeviation, kSumOfRatios };
enum : int { kCountLowRatio = kStatTokens + 1, kCountHighRatio, kCountKept };
enum : int { kMostRatio, kLeastRatio, kMostWeight, kLeastWeightOfTokens };

RLK_HD float low_ratio(const ImportanceSpec& s) { return s.low > -infinity() ? s.low : div_rn(1.0f, s.high); }

// What the pass over tokens computes besides the weights and `kept`: nothing, the sum for the mean weight, or the sums
// for the metrics.
enum class ImportanceForm { kAlone, kNormalized, kMeasured };
RLK_HD ImportanceForm form_of(const ImportanceWeightsParams& p) {
  if (p.metrics != nullptr) return ImportanceForm::kMeasured;
  return p.spec.normalize != 0 ? ImportanceForm::kNormalized : ImportanceForm::kAlone;
}

template <ImportanceForm kForm>
struct ImportanceTokenTerms : LowerSums {
  static constexpr bool kMeasures = kForm == ImportanceForm::kMeasured;
  static constexpr int kInputs = 2, kOutputs = 2, kSums = kForm == ImportanceForm::kAlone ? 0 : 8;
  static constexpr int kMaxima = kMeasures ? kTokenMaxima : 1;
  using Factors = ImportanceFactors;
  using Params = ImportanceWeightsParams;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == 0 ? p.logprob : p.rollout_logprob; }
  static RLK_HD float* output(const Params& p, int i) { return i == 0 ? p.weights : p.kept; }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors& f, const F (&in)[kInputs], MaskOf<F> mask,
                           F (&out)[kOutputs], TokenSums<F, kSums>* sums) {
    const ImportanceSpec& s = p.spec;
    const F zero = broadcast<F>(0.0f), one = broadcast<F>(1.0f);
    const F d = rollout_log_ratio(s.rollout_neutral != 0, in[0], in[1], in[1]);
    const auto never = MaskOf<F>(zero > zero);
    F e = broadcast<F>(f.ratio), w = broadcast<F>(f.weight);
    if (s.level == ImportanceLevel::kToken) {
      e = exp(clamped(d, -s.limit, s.limit));
      w = limited_weight(importance_bounds(s), e).weight;
    }
    w = either(f.broken != 0, broadcast<F>(canonical_nan()), w);
    auto kept = either(f.kept != 0 && f.broken == 0, mask, never);
    if (rejects(s.token)) kept = inside(s.token, divergence_of(clamped(d, -s.limit, s.limit)), kept);
    out[0] = canonical(where(mask, w));
    out[1] = select(kept, one, zero);
    if constexpr (kSums > 0) sum_up(p, e, w, mask, kept, sums);
  }

 private:
  template <class F>
  static RLK_HD void sum_up(const Params& p, F e, F w, MaskOf<F> mask, MaskOf<F> kept, TokenSums<F, kSums>* sums) {
    const ImportanceSpec& s = p.spec;
    clear(sums);
    sums->sum[kSumWeight] = where(mask, w);
    sums->count[kStatTokens] = counted<F>(mask);
    if constexpr (!kMeasures) return;
    const F u = sub_rn(w, broadcast<F>(1.0f));
    sums->sum[kSumDeviation] = where(mask, u);
    sums->sum[kSumOfRatios] = where(mask, e);
    sums->count[kCountLowRatio] = counted<F>(MaskOf<F>(mask & (e < broadcast<F>(low_ratio(s)))));
    sums->count[kCountHighRatio] = counted<F>(MaskOf<F>(mask & (e > broadcast<F>(s.high))));
    sums->count[kCountKept] = counted<F>(kept);
    sums->maximum[kMostRatio] = where(mask, e);
    sums->maximum[kLeastRatio] = where(mask, opposite(e));
    sums->maximum[kMostWeight] = where(mask, w);
    sums->maximum[kLeastWeightOfTokens] = where(mask, opposite(w));
  }
};

// The Batch of importance_weights. The results of this Batch are the metrics and the mean weight. Normalization divides
// all weights by the mean weight.
struct ImportanceBatch {
  static constexpr int kGroups = 1, kSums = 3, kCounts = 9, kMaxima = 7, kResults = kImportanceMetrics + 1;
  enum : int { kTokens, kSequences, kBadCuts, kLow, kHigh, kKept, kRejecting, kLowSequences, kHighSequences };
  enum : int {
    kWeight,
    kOfTokens,
    kOfSequences
  };  // kWeight: the sum from which `normalize` takes the mean weight, over tokens or sequences
  enum : int { kMostOfSequences = kTokenMaxima, kLeastOfSequences, kMostDeviation };
  using Params = ImportanceWeightsParams;
  using Factors = ImportanceFactors;
  struct Shared {
    float divisor;
    CentralPair pair;  // the scales of the weights, and of the sequences' mean weights, which use the same scale
  };
  using Context = TokenContext<ImportanceBatch>;
  using Statistics = ImportanceStatisticsTerms;
  using Total = TotalSums<kSums, kCounts, kMaxima>;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD bool needs_pass_before(const Params& p) { return needs_statistics(p.spec); }
  static RLK_HD bool counts_alone(const Params&) { return false; }
  static RLK_HD bool needs_sums(const Params& p) { return p.spec.normalize != 0 || p.metrics != nullptr; }
  static RLK_HD Factors factors_of(const Params& p, std::int64_t s, const SequenceSums<8>& of) {
    return importance_factors(p, s, of);
  }
  static RLK_HD bool shares(const Params&) { return false; }
  template <class Add>
  static RLK_HD void share(const Factors&, Shared*, const Add&) {}
  template <class Terms>
  static RLK_HD Factors factors(const Params& p, const Context& context, bool has_pass_before, std::int64_t s) {
    if (has_pass_before) return in_global(context.factors)[s];
    Factors f;
    f.broken = has_bad_offsets(p.sequences, s);
    return f;
  }
  static RLK_HD Total missing() { return {}; }
  static RLK_HD Total of_sequence(const Params& p, const Context& context, std::int64_t s,
                                  const SequenceSums<8> (&groups)[kGroups]) {
    Total t = {};
    const std::int64_t tokens = groups[0].count[kStatTokens];
    t.count[kBadCuts] = has_bad_offsets(p.sequences, s);
    if (tokens == 0) return t;
    t.count[kTokens] = tokens;
    t.count[kSequences] = 1;
    const SequenceSums<8>& of = groups[0];
    const bool of_token = p.spec.level == ImportanceLevel::kToken;
    t.sum[kWeight] = of_token ? of.sum[kSumWeight] : in_global(context.factors)[s].weight;
    if (p.metrics == nullptr) return t;
    const float n = static_cast<float>(tokens), deviation = div_rn(of.sum[kSumDeviation], n);
    const float mean = div_rn(of.sum[kSumWeight], n), ratio = div_rn(of.sum[kSumOfRatios], n);
    t.sum[kOfTokens] = of.sum[kSumWeight];
    t.sum[kOfSequences] = mean;
    t.count[kLow] = of_token ? of.count[kCountLowRatio] : of.count[kCountLowRatio] > 0;
    t.count[kHigh] = of_token ? of.count[kCountHighRatio] : of.count[kCountHighRatio] > 0;
    t.count[kKept] = of.count[kCountKept];
    t.count[kRejecting] = of.count[kCountKept] < tokens;
    t.count[kLowSequences] = ratio < low_ratio(p.spec);
    t.count[kHighSequences] = ratio > p.spec.high;
    for (int i = 0; i < kTokenMaxima; ++i) t.maximum[i] = of.maximum[i];
    t.maximum[kMostOfSequences] = mean;
    t.maximum[kLeastOfSequences] = opposite(mean);
    t.maximum[kMostDeviation] = abs_of(deviation);
    return t;
  }
  // The divisor is stored after the metrics.
  static RLK_HD void store(const Params& p, const Context& context, const Total& t, int i) {
    const bool of_divisor = i == kImportanceMetrics;
    if (!of_divisor && p.metrics == nullptr) return;
    // this metric and two that follow from it (kImportanceSeqStd, kImportanceEss) come from the pass over central
    // moments
    if (i == kImportanceWeightStd) {
      in_global(context.shared)->pair = pair_of(t);
      return;
    }
    if (i == kImportanceSeqStd || i == kImportanceEss) return;
    float divisor = 1.0f;
    if (of_divisor || (i == kImportanceDivisor && p.spec.normalize != 0)) {
      const bool of_token = p.spec.level == ImportanceLevel::kToken;
      const float mean = quotient_or_zero(t.sum[0], static_cast<float>(t.count[of_token ? kTokens : kSequences]));
      if (!(mean <= kLeastMeanWeight)) divisor = canonical(mean);
    }
    float result = i >= kImportanceDivisor ? divisor : metric(p, t, i);
    if (t.count[kBadCuts] > 0) result = canonical_nan();
    if (of_divisor) {
      in_global(context.shared)->divisor = result;
    } else {
      in_global(p.metrics)[i] = result;
    }
  }
  static constexpr ResultSources<kImportanceMetrics> sources() {
    using Of = ResultOf;
    constexpr auto kOfTokens = ResultOver::kTokens, kOfSequences = ResultOver::kSequences;
    ResultSources<kImportanceMetrics> from;
    from.set(kImportanceNumTokens, Of::kCount, kTokens);
    from.set(kImportanceNumSequences, Of::kCount, kSequences);
    from.set(kImportanceWeightMean, Of::kSum, ImportanceBatch::kOfTokens, kOfTokens);
    from.set(kImportanceWeightMin, Of::kMaximum, kLeastWeightOfTokens);
    from.set(kImportanceWeightMax, Of::kMaximum, kMostWeight);
    from.set(kImportanceRatioMin, Of::kMaximum, kLeastRatio);
    from.set(kImportanceRatioMax, Of::kMaximum, kMostRatio);
    from.set(kImportanceFractionLow, Of::kCount, kLow);
    from.set(kImportanceFractionHigh, Of::kCount, kHigh);
    from.set(kImportanceSeqMean, Of::kSum, ImportanceBatch::kOfSequences, kOfSequences);
    from.set(kImportanceSeqMin, Of::kMaximum, kLeastOfSequences);
    from.set(kImportanceSeqMax, Of::kMaximum, kMostOfSequences);
    from.set(kImportanceSeqDeviationMax, Of::kMaximum, kMostDeviation);
    from.set(kImportanceSeqFractionLow, Of::kCount, kLowSequences, kOfSequences);
    from.set(kImportanceSeqFractionHigh, Of::kCount, kHighSequences, kOfSequences);
    from.set(kImportanceRejectedFraction, Of::kCount, kTokens, kOfTokens);
    from.set(kImportanceSeqRejectedFraction, Of::kCount, kRejecting, kOfSequences);
    return from;
  }
  static RLK_HD float metric(const Params& p, const Total& t, int i) {
    const float tokens = static_cast<float>(t.count[kTokens]), sequences = static_cast<float>(t.count[kSequences]);
    Quotient q = result_of(source_of<ImportanceBatch>(i), t, tokens, sequences);
    if (i == kImportanceFractionLow || i == kImportanceFractionHigh) {
      q.d = p.spec.level == ImportanceLevel::kToken ? tokens : sequences;
    }
    if (i == kImportanceWeightMin || i == kImportanceRatioMin || i == kImportanceSeqMin) {
      q.n = t.count[kTokens] > 0 ? opposite(q.n) : 0.0f;
    }
    if (i == kImportanceRejectedFraction) q.n = static_cast<float>(t.count[kTokens] - t.count[kKept]);
    return q.value();
  }
  static RLK_HD CentralPair pair_of(const Total& t) {
    const float tokens = static_cast<float>(t.count[kTokens]), sequences = static_cast<float>(t.count[kSequences]);
    const float most = t.maximum[kMostWeight];
    return {{central_point(t.sum[kOfTokens], tokens, most), central_point(t.sum[kOfSequences], sequences, most)}};
  }
};

// Computes metrics from the moments of the weights, which earlier passes wrote, and from the moments of the sequences'
// mean weights.
struct ImportanceMoments {
  static constexpr int kInputs = 1, kResults = 3;
  static constexpr bool kProducts = false;
  using Batch = ImportanceBatch;
  using Params = ImportanceWeightsParams;
  using Pair = CentralPair;
  static RLK_HD PolicyTokens input(const Params& p, int) { return {p.weights, p.sequences.num_tokens, 1}; }
  template <class F>
  static RLK_HD void values(const Pair&, const F (&in)[kInputs], F (&values)[2]) {
    values[0] = values[1] = in[0];
  }
  template <class Total>
  static RLK_HD void of_sequence(const Pair& pair, const SequenceSums<8>& of, Total* t) {
    const float n = static_cast<float>(of.count[kCentralTokens]);
    const float shift = mul_rn(sub_rn(pair.of[0].mean, pair.of[1].mean), pair.of[0].up);
    const float d = n == 0.0f ? 0.0f : add_rn(div_rn(of.sum[kCentralOfA], n), shift);
    t->sum[kCentralOfB] = d;
    t->sum[kCentralSquaresB] = mul_rn(d, d);
  }
  static RLK_HD int metric(int i) {
    return i == 0 ? kImportanceWeightStd : i == 1 ? kImportanceSeqStd : kImportanceEss;
  }
  template <class Total>
  static RLK_HD float result(const Pair& pair, const Total& t, int i) {
    const CentralPoint& point = pair.of[0];
    const float tokens = static_cast<float>(t.count[kCentralTokens]);
    const float sequences = static_cast<float>(t.count[kCentralSequences]);
    if (i == 1) {
      const float v = is_constant(t, 0) ? 0.0f : central_square(t.sum[kCentralOfB], t.sum[kCentralSquaresB], sequences);
      return mul_rn(sqrt_rn(sequences > 1.0f ? div_rn(v, sub_rn(sequences, 1.0f)) : 0.0f), point.unit());
    }
    const float v = quotient_or_zero(central_square(t, 0), tokens);
    if (i == 0) return mul_rn(sqrt_rn(v), point.unit());
    const float mean = mul_rn(point.mean, point.up);
    return mean == 0.0f ? 0.0f : div_rn(1.0f, add_rn(1.0f, div_rn(div_rn(v, mean), mean)));
  }
};
using ImportanceMomentsBatch = CentralBatch<ImportanceMoments>;

template <class F>
RLK_HD F normalized(F weight, float divisor) {
  const F zero = broadcast<F>(0.0f);
  return select(weight == zero, zero, canonical(div_rn(weight, broadcast<F>(divisor))));
}

}  // namespace rlk
