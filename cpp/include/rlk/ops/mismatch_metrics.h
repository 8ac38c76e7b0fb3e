// THE CONTRACT of `mismatch_metrics`: a vector of scalars that measure how far a trainer's log-probabilities are from
// the sampling engine's. Rule numbers refer to docs/numerics.md. A metric that verl has, too, uses verl's formula;
// docs/objectives.md names the differences. Formulas are in fp32, in the order shown, with one rounding per operation;
// exp and expm1 come from math/.
//
// rlk/tokens.h defines slots, sequences and their sums. A token has x = logprob_train, y = logprob_rollout and d =
// fl(x - y), the log of the ratio of train to rollout. N is the number of tokens, S the number of sequences with a
// token, n the number of a sequence's tokens. With rollout_neutral, y is x and d is +0 where logprob_rollout is NaN;
// only differing_fraction and nonfinite_fraction still count such a token.
//   c      = min(max(d, -limit), limit)
//   P      = 0 - expm1(x), which is 1 minus the probability. But P = exp(x) if the sum of exp(x) over all tokens is
//            smaller than the sum of 0 - expm1(x). So P keeps the digits in which probabilities can differ. Q is
//            computed in the same way from y
// Metrics of tokens; sum(f) adds over a sequence, then over sequences.
//   dlogp_mean = sum(|d|) / N; dlogp_max; kl = -sum(d) / N (k1 of KL(rollout, train));
//   k3 = sum(expm1(d) - min(d, largest)) / N
//   ratio_mean = sum(exp(c)) / N; chi2_token = sum(expm1(2 c)) / N
//   ess = ratio_mean ratio_mean / (sum(exp(c) exp(c)) / N), since 1 + chi2_token loses digits where ratios are small.
//   correlation = ((C / sqrt(V_P)) / sqrt(V_Q)), limited to [-1, 1], C and V of kernels/tokens/central_moments.h. It is
//                 negated if one of P and Q is exp() and the other is 0 - expm1(), so the result is the correlation of
//                 the probabilities. It is 0 where V_P or V_Q is 0, as for a constant.
//   differing_fraction: fraction of tokens whose x and y have different bits (all NaNs count as equal).
//   nonfinite_fraction: fraction of tokens whose d is NaN or Inf.
//   `largest` is the largest finite number, so k3 of an infinite d is an infinity and not NaN.
//   histogram: fractions of tokens whose d lies in each bin; mismatch_edge gives the edges between bins. An edge
//   belongs to the bin above it; a NaN is in no bin.
// Metrics of sequences: a = -(sum(x) / n), b = -(sum(y) / n), g = -(sum(d) / n). Means are over the S sequences.
//   ppl_train = mean(exp(a)); ppl_rollout = mean(exp(b)); log_ppl_train = mean(a); log_ppl_rollout = mean(b)
//   ppl_ratio = mean(exp(g)); log_ppl_diff_mean = mean(g), _abs_mean = mean(|g|), _min, _max
//   chi2_seq = mean(expm1(2 min(max(sum(d), -limit), limit)))
// Without any token every metric is 0. No result depends on what a masked slot holds. A zero is +0, and a NaN is the
// canonical NaN. The bits are the same for padded and packed sequences, for any strides, and on every backend. The call
// enqueues its work on `stream`; it neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr int kMismatchBins = 9;
// The edge between bins i and i + 1: -1, -0.1, -0.01, -0.001, 0.001, 0.01, 0.1, 1. A function returns the edge because
// device code cannot read a constant table of the host.
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
  kMismatchNumSequences,  // sequences that have a token
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
  float limit = 0.0f;            // > 0, limits |log ratio| before exp; Inf: no limit
  std::int32_t rollout_neutral = 0;
  float* metrics = nullptr;   // [kMismatchMetrics]
  void* workspace = nullptr;  // mismatch_metrics_workspace_bytes(...), 16-byte aligned
};
std::int64_t mismatch_metrics_workspace_bytes(const MismatchMetricsParams& p, Device device);
// For bad offsets (docs/tokens.md) the CPU throws InvalidArgument. On a GPU bad offsets make every metric NaN.
void mismatch_metrics(const MismatchMetricsParams& p, Device device, Stream stream);

}  // namespace rlk
