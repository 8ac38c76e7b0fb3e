// The formulas of ops/mismatch_metrics.h that every backend shares, and the checks for memory safety.
//
// One pass over a tile computes at most eight sums and six counts. The twelve sums and twelve counts are therefore
// split into two groups. Each group reads the tokens; the second read hits in a cache.
#pragma once

#include "kernels/losses/policy_check.h"
#include "kernels/tokens/central_moments.h"
#include "kernels/tokens/results.h"
#include "kernels/tokens/terms.h"
#include "rlk/math/exp.h"
#include "rlk/math/expm1.h"
#include "rlk/ops/mismatch_metrics.h"

namespace rlk {

inline void check_mismatch_metrics(const MismatchMetricsParams& p) {
  check_sequences(p.sequences, p.mask, "mismatch_metrics");
  RLK_CHECK(p.metrics != nullptr, "mismatch_metrics: metrics is given");
  RLK_CHECK(p.limit > 0.0f, "mismatch_metrics: limit is positive");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.logprob_train.data && p.logprob_train.token_stride == 1, "mismatch_metrics: logprob_train, one a token");
  RLK_CHECK(p.logprob_rollout.data && p.logprob_rollout.token_stride == 1,
            "mismatch_metrics: logprob_rollout, one a token");
}

// Whether x and y have different bits. All NaNs count as equal. Vectors can only be compared as floats, so +0 would
// equal -0. Adding the bits of 1 to the bits of a zero turns +0 into 1 and -0 into -1.
template <class F>
RLK_HD MaskOf<F> differ(F x, F y) {
  constexpr std::int32_t kOne = 0x3f800000;
  const F zero = broadcast<F>(0.0f);
  const F of_x = select(x == zero, float_of(bits_of(x) + kOne), zero);
  const F of_y = select(y == zero, float_of(bits_of(y) + kOne), zero);
  const auto numbers = (x < y) | (x > y) | (of_x < of_y) | (of_x > of_y);
  const auto nan_x = is_nan(x), nan_y = is_nan(y);
  const auto nans = (nan_x & (y == y)) | (nan_y & (x == x));
  return MaskOf<F>(numbers | nans);
}

enum : int { kMismatchDifferences, kMismatchProbabilities, kMismatchGroups };
enum : int {  // sums of kMismatchDifferences
  kSumLogRatio,
  kSumDistance,
  kSumK3,
  kSumTrain,
  kSumRollout,
  kSumRatioOfTokens,
  kSumChi2,
  kSumRatioSquared,
  kDifferenceSums,
};
// Sums of the group kMismatchProbabilities. From kSumMissing on: sums of 1 minus the probability, for trainer and
// rollout. From kSumPresent on: sums of the probability. The maxima have the same order.
constexpr int kSumMissing = 0, kSumPresent = 2, kProbabilitySums = 4;
enum : int { kCountOfTokens, kCountDiffering, kCountNonfinite, kFirstBin };
constexpr int kBinsOfDifferences = kTokenCounts - kFirstBin;  // the group kMismatchProbabilities counts the other bins
static_assert(kMismatchBins - kBinsOfDifferences <= kTokenCounts);

struct MismatchFactors {};
template <class F>
RLK_HD F missing_probability(F logprob) {
  return sub_rn(broadcast<F>(0.0f), expm1(logprob));
}
template <int kGroup>
struct MismatchTerms : EverySum {
  static constexpr int kInputs = 2, kOutputs = 1, kSums = 8;
  static constexpr int kMaxima = kGroup == kMismatchDifferences ? EverySum::kMaxima : kProbabilitySums;
  using Factors = MismatchFactors;
  using Params = MismatchMetricsParams;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == 0 ? p.logprob_train : p.logprob_rollout; }
  static RLK_HD float* output(const Params&, int) { return nullptr; }

  template <class F>
  static RLK_HD MaskOf<F> in_bin(F d, int bin) {
    const auto above = d >= broadcast<F>(bin == 0 ? -infinity() : mismatch_edge(bin - 1));
    if (bin == kMismatchBins - 1) return MaskOf<F>(above);
    return MaskOf<F>(above & (d < broadcast<F>(mismatch_edge(bin))));
  }
  template <class F>
  static RLK_HD void token(const Params& p, const Factors&, const F (&in)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>* sums) {
    const F zero = broadcast<F>(0.0f), x = in[0], y = rollout_or(p.rollout_neutral != 0, in[1], x);
    const F d = rollout_log_ratio(p.rollout_neutral != 0, x, y, in[1]);
    F* const sum = sums->sum;
    out[0] = zero;
    clear(sums);
    if constexpr (kGroup == kMismatchDifferences) {
      const F c = clamped(d, -p.limit, p.limit);
      sum[kSumLogRatio] = d;
      sum[kSumDistance] = abs_of(d);
      sum[kSumK3] = sub_rn(expm1(d), min_of(d, broadcast<F>(kLargestFloat)));
      sum[kSumTrain] = x;
      sum[kSumRollout] = y;
      const F ratio = where(mask, exp(c));
      sum[kSumRatioOfTokens] = ratio;
      sum[kSumRatioSquared] = mul_rn(ratio, ratio);
      sum[kSumChi2] = expm1(add_rn(c, c));
      sums->maximum[0] = sum[kSumDistance];
      const F large = broadcast<F>(infinity());
      sums->count[kCountOfTokens] = counted<F>(mask);
      sums->count[kCountDiffering] = counted<F>(mask & differ(x, in[1]));
      sums->count[kCountNonfinite] =
          counted<F>(mask & MaskOf<F>(is_nan(d) | is_nan(in[1]) | (sum[kSumDistance] == large)));
      RLK_UNROLL
      for (int i = 0; i < kBinsOfDifferences; ++i) sums->count[kFirstBin + i] = counted<F>(mask & in_bin(d, i));
    } else {
      RLK_UNROLL
      for (int i = 0; i < 2; ++i) {
        sum[kSumMissing + i] = missing_probability(i == 0 ? x : y);
        sum[kSumPresent + i] = where(mask, exp(i == 0 ? x : y));
      }
      RLK_UNROLL
      for (int i = 0; i < kProbabilitySums; ++i) sums->maximum[i] = abs_of(sum[i]);
      RLK_UNROLL
      for (int i = kBinsOfDifferences; i < kMismatchBins; ++i) {
        sums->count[i - kBinsOfDifferences] = counted<F>(mask & in_bin(d, i));
      }
    }
  }
};

// Sums over sequences. First come the sums over tokens, then the sums of one term per sequence.
enum : int {
  kTotalLogRatio,
  kTotalDistance,
  kTotalK3,
  kTotalRatio,
  kTotalChi2,
  kTotalRatioSquared,
  kTotalProbabilities,
  kTotalPplTrain = kTotalProbabilities + kProbabilitySums,
  kTotalPplRollout,
  kTotalLogPplTrain,
  kTotalLogPplRollout,
  kTotalPplRatio,
  kTotalDiff,
  kTotalAbsDiff,
  kTotalChi2Seq,
  kMismatchTotals,
};
constexpr int kCountOfSequences = kTokenCounts * kMismatchGroups, kCountOfBadCuts = kCountOfSequences + 1;
enum : int {
  kMostDistance,
  kMostDiff,
  kMostMinusDiff,
  kMostProbabilities,
  kMismatchMaxima = kMostProbabilities + kProbabilitySums
};

struct MismatchPair : CentralPair {
  // for each of the two values: 1 if it is 1 minus the probability, 0 if it is the probability
  std::int32_t missing[2];
  std::int32_t rollout_neutral;
};

struct MismatchBatch {
  static constexpr int kGroups = kMismatchGroups, kSums = kMismatchTotals, kCounts = kCountOfBadCuts + 1;
  static constexpr int kMaxima = kMismatchMaxima, kResults = kMismatchMetrics;
  using Params = MismatchMetricsParams;
  using Factors = MismatchFactors;
  struct Shared {
    MismatchPair pair;
  };
  using Context = TokenContext<MismatchBatch>;
  using Total = TotalSums<kSums, kCounts, kMaxima>;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD bool needs_pass_before(const Params&) { return false; }
  static RLK_HD bool needs_sums(const Params&) { return true; }
  template <class Terms>
  static RLK_HD Factors factors(const Params&, const Context&, bool, std::int64_t) {
    return {};
  }
  static RLK_HD Total missing() {
    Total t = {};
    t.maximum[kMostDiff] = t.maximum[kMostMinusDiff] = -infinity();
    return t;
  }
  static RLK_HD Total of_sequence(const Params& p, const Context&, std::int64_t s,
                                  const SequenceSums<8> (&groups)[kGroups]) {
    const SequenceSums<8>&of = groups[kMismatchDifferences], &of_p = groups[kMismatchProbabilities];
    Total t = missing();
    for (int i = 0; i < kTokenCounts; ++i) {
      t.count[i] = of.count[i];
      t.count[kTokenCounts + i] = of_p.count[i];
    }
    t.count[kCountOfBadCuts] = has_bad_offsets(p.sequences, s);
    if (of.count[kCountOfTokens] == 0) return t;
    t.count[kCountOfSequences] = 1;
    t.sum[kTotalLogRatio] = of.sum[kSumLogRatio];
    t.sum[kTotalDistance] = of.sum[kSumDistance];
    t.sum[kTotalK3] = of.sum[kSumK3];
    t.sum[kTotalRatio] = of.sum[kSumRatioOfTokens];
    t.sum[kTotalChi2] = of.sum[kSumChi2];
    t.sum[kTotalRatioSquared] = of.sum[kSumRatioSquared];
    for (int i = 0; i < kProbabilitySums; ++i) {
      t.sum[kTotalProbabilities + i] = of_p.sum[i];
      t.maximum[kMostProbabilities + i] = of_p.maximum[i];
    }
    const float n = static_cast<float>(of.count[kCountOfTokens]);
    const float a = -div_rn(of.sum[kSumTrain], n), b = -div_rn(of.sum[kSumRollout], n);
    const float g = -div_rn(of.sum[kSumLogRatio], n), c = clamped(of.sum[kSumLogRatio], -p.limit, p.limit);
    t.sum[kTotalPplTrain] = exp(a);
    t.sum[kTotalPplRollout] = exp(b);
    t.sum[kTotalLogPplTrain] = a;
    t.sum[kTotalLogPplRollout] = b;
    t.sum[kTotalPplRatio] = exp(g);
    t.sum[kTotalDiff] = g;
    t.sum[kTotalAbsDiff] = abs_of(g);
    t.sum[kTotalChi2Seq] = expm1(add_rn(c, c));
    t.maximum[kMostDistance] = of.maximum[0];
    t.maximum[kMostDiff] = g;
    t.maximum[kMostMinusDiff] = -g;
    return t;
  }

  // For each value, chooses between the probability and 1 minus the probability. The smaller sum keeps more digits.
  static RLK_HD MismatchPair pair_of(const Total& t) {
    const float tokens = static_cast<float>(t.count[kCountOfTokens]);
    MismatchPair pair = {};
    for (int i = 0; i < 2; ++i) {
      const float lacks = t.sum[kTotalProbabilities + kSumMissing + i];
      const float has = t.sum[kTotalProbabilities + kSumPresent + i];
      const int at = has < lacks ? kSumPresent + i : kSumMissing + i;
      pair.missing[i] = at < kSumPresent;
      pair.of[i] = central_point(t.sum[kTotalProbabilities + at], tokens, t.maximum[kMostProbabilities + at]);
    }
    return pair;
  }

  static constexpr ResultSources<kResults> sources() {
    using Of = ResultOf;
    constexpr auto kOfTokens = ResultOver::kTokens, kOfSequences = ResultOver::kSequences;
    ResultSources<kResults> from;
    from.set(kMismatchNumTokens, Of::kCount, kCountOfTokens);
    from.set(kMismatchNumSequences, Of::kCount, kCountOfSequences);
    from.set(kMismatchDlogpMean, Of::kSum, kTotalDistance, kOfTokens);
    from.set(kMismatchDlogpMax, Of::kMaximum, kMostDistance);
    from.set(kMismatchKl, Of::kSum, kTotalLogRatio, kOfTokens);
    from.set(kMismatchK3, Of::kSum, kTotalK3, kOfTokens);
    from.set(kMismatchRatioMean, Of::kSum, kTotalRatio, kOfTokens);
    from.set(kMismatchChi2Token, Of::kSum, kTotalChi2, kOfTokens);
    from.set(kMismatchChi2Seq, Of::kSum, kTotalChi2Seq, kOfSequences);
    from.set(kMismatchPplTrain, Of::kSum, kTotalPplTrain, kOfSequences);
    from.set(kMismatchPplRollout, Of::kSum, kTotalPplRollout, kOfSequences);
    from.set(kMismatchLogPplTrain, Of::kSum, kTotalLogPplTrain, kOfSequences);
    from.set(kMismatchLogPplRollout, Of::kSum, kTotalLogPplRollout, kOfSequences);
    from.set(kMismatchPplRatio, Of::kSum, kTotalPplRatio, kOfSequences);
    from.set(kMismatchLogPplDiffMean, Of::kSum, kTotalDiff, kOfSequences);
    from.set(kMismatchLogPplDiffAbsMean, Of::kSum, kTotalAbsDiff, kOfSequences);
    from.set(kMismatchLogPplDiffMin, Of::kMaximum, kMostMinusDiff);
    from.set(kMismatchLogPplDiffMax, Of::kMaximum, kMostDiff);
    from.set(kMismatchDifferingFraction, Of::kCount, kCountDiffering, kOfTokens);
    from.set(kMismatchNonfiniteFraction, Of::kCount, kCountNonfinite, kOfTokens);
    for (int i = 0; i < kMismatchBins; ++i) from.set(kMismatchHistogram + i, Of::kCount, kFirstBin + i, kOfTokens);
    return from;
  }
  static RLK_HD void store(const Params& p, const Context& context, const Total& t, int i) {
    // the pass over central moments computes the correlation from the pair stored here
    if (i == kMismatchCorrelation) {
      MismatchPair pair = pair_of(t);
      pair.rollout_neutral = p.rollout_neutral;
      in_global(context.shared)->pair = pair;
      return;
    }
    const float tokens = static_cast<float>(t.count[kCountOfTokens]);
    Quotient q = result_of(source_of<MismatchBatch>(i), t, tokens, static_cast<float>(t.count[kCountOfSequences]));
    if (i == kMismatchKl || i == kMismatchLogPplDiffMin) q.n = -q.n;
    if ((i == kMismatchLogPplDiffMin || i == kMismatchLogPplDiffMax) && tokens == 0.0f) q.n = 0.0f;
    if (i == kMismatchEss) {
      const float ratio = quotient_or_zero(t.sum[kTotalRatio], tokens);
      q = {mul_rn(ratio, ratio), quotient_or_zero(t.sum[kTotalRatioSquared], tokens)};
    }
    if (t.count[kCountOfBadCuts] > 0) q.n = canonical_nan(), q.d = 1.0f;
    in_global(p.metrics)[i] = q.value();
  }
};

// Computes a metric from the moments of probabilities.
struct MismatchMoments {
  static constexpr int kInputs = 2, kResults = 1;
  static constexpr bool kProducts = true;
  using Batch = MismatchBatch;
  using Params = MismatchMetricsParams;
  using Pair = MismatchPair;
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == 0 ? p.logprob_train : p.logprob_rollout; }
  template <class F>
  static RLK_HD void values(const Pair& pair, const F (&in)[kInputs], F (&values)[2]) {
    RLK_UNROLL
    for (int i = 0; i < 2; ++i) {
      const F x = i == 0 ? in[0] : rollout_or(pair.rollout_neutral != 0, in[1], in[0]);
      values[i] = either(pair.missing[i] != 0, missing_probability(x), exp(x));
    }
  }
  template <class Total>
  static RLK_HD void of_sequence(const Pair&, const SequenceSums<8>&, Total*) {}
  static RLK_HD int metric(int) { return kMismatchCorrelation; }
  template <class Total>
  static RLK_HD float result(const Pair& pair, const Total& t, int) {
    const float p = central_square(t, 0), q = central_square(t, 1);
    if (p == 0.0f || q == 0.0f) return 0.0f;
    const float both = central_product(t.sum[kCentralOfA], t.sum[kCentralOfB], t.sum[kCentralProducts],
                                       static_cast<float>(t.count[kCentralTokens]));
    const float r = clamped(div_rn(div_rn(both, sqrt_rn(p)), sqrt_rn(q)), -1.0f, 1.0f);
    return pair.missing[0] == pair.missing[1] ? r : -r;
  }
};
using MismatchMomentsBatch = CentralBatch<MismatchMoments>;

}  // namespace rlk
