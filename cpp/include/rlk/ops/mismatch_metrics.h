// THE CONTRACT of mismatch_metrics: how far the log-probabilities of a trainer and of the engine that sampled are apart, as one
// vector of scalars. Rules are those of docs/numerics.md; formulas are verl's where it has them (docs/objectives.md says where
// they differ). Written formulas are fp32, one rounding an operation, in the order shown; exp and expm1 are those of math/.
//
// Sequences, sums: rlk/tokens.h. A token has x = logprob_train, y = logprob_rollout, d = fl(x - y), the log of the
// ratio of train to rollout; N the number of tokens, S that of sequences with a token, n of a sequence's tokens.
// With rollout_neutral y is x, and d +0, where logprob_rollout is NaN; the fractions differing and nonfinite count it.
//   c      = min(max(d, -limit), limit)
//   P      = of x 0 - expm1(x), what the probability lacks to 1, or exp(x) where the sum of that over all tokens is the smaller:
//            what it has left to differ in, with its digits; Q = of y likewise
// Metrics of tokens; sum(f) goes over a sequence, then over sequences
//   dlogp_mean = sum(|d|) / N; dlogp_max; kl = -sum(d) / N (k1 of KL(rollout, train)); k3 = sum(expm1(d) - min(d, largest)) / N
//   ratio_mean = sum(exp(c)) / N; chi2_token = sum(expm1(2 c)) / N; ess = ratio_mean ratio_mean / (1 + chi2_token)
//   correlation = ((C / sqrt(V_P)) / sqrt(V_Q)), limited to [-1, 1], C and V of rlk/kernels/central_moments.h, negated where P and
//     Q are not of one form: that of the probabilities; 0 where V_P or V_Q is 0, which they are of a constant
//   differing_fraction: of tokens whose x and y have other bits (all NaN are one); nonfinite_fraction: whose d is NaN or Inf
//   largest: the largest number, so that k3 of an infinite d is an infinity
//   histogram: fractions of tokens by d, with the edges mismatch_edge; an edge belongs to the bin above it, a NaN to none
// Metrics of sequences: a = -(sum(x) / n), b = -(sum(y) / n), g = -(sum(d) / n); their means are over S sequences
//   ppl_train = mean(exp(a)); ppl_rollout = mean(exp(b)); log_ppl_train = mean(a); log_ppl_rollout = mean(b)
//   ppl_ratio = mean(exp(g)); log_ppl_diff_mean = mean(g), _abs_mean = mean(|g|), _min, _max
//   chi2_seq = mean(expm1(2 min(max(sum(d), -limit), limit)))
// Without a token everything is 0. Nothing in a masked slot decides a bit. A zero is +0, a NaN canonical.
// Same bits for padded and packed sequences, any strides, and on every backend. Enqueues on `stream`; neither allocates nor
// synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr int kMismatchBins = 9;
// The edge between bins i and i + 1: -1, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1. A function, as device code may address no table.
RLK_HD constexpr float mismatch_edge(int i) {
  return i == 0   ? -1.0f
         : i == 1 ? -0.1f
         : i == 2 ? -0.01f
         : i == 3 ? -0.001f
         : i == 4 ? 0.001f
         : i == 5 ? 0.01f
         : i == 6 ? 0.1f
                  : 1.0f;
}

enum MismatchMetric : int {
  kMismatchNumTokens,
  kMismatchNumSequences,  // that have a token
  kMismatchDlogpMean,
  kMismatchDlogpMax,
  kMismatchKl,
  kMismatchK3,
  kMismatchRatioMean,
  kMismatchEss,
  kMismatchChi2Token,
  kMismatchChi2Seq,
  kMismatchPplTrain,
  kMismatchPplRollout,
  kMismatchLogPplTrain,
  kMismatchLogPplRollout,
  kMismatchPplRatio,
  kMismatchLogPplDiffMean,
  kMismatchLogPplDiffAbsMean,
  kMismatchLogPplDiffMin,
  kMismatchLogPplDiffMax,
  kMismatchCorrelation,
  kMismatchDifferingFraction,
  kMismatchNonfiniteFraction,
  kMismatchHistogram,
  kMismatchMetrics = kMismatchHistogram + kMismatchBins,
};

struct MismatchMetricsParams {
  Sequences sequences;
  PolicyTokens logprob_train;    // [slots]
  PolicyTokens logprob_rollout;  // [slots]
  TokenMask mask;                // [slots]; null: every token counts
  float limit = 0.0f;            // > 0, of |log ratio| before exp; Inf: none
  std::int32_t rollout_neutral = 0;
  float* metrics = nullptr;   // [kMismatchMetrics]
  void* workspace = nullptr;  // mismatch_metrics_workspace_bytes(...), 16-byte aligned
};
std::int64_t mismatch_metrics_workspace_bytes(const MismatchMetricsParams& p, Device device);
// Bad offsets (docs/tokens.md) are an InvalidArgument on the CPU; on a GPU every metric is NaN.
void mismatch_metrics(const MismatchMetricsParams& p, Device device, Stream stream);

}  // namespace rlk
