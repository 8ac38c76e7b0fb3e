// THE CONTRACT of `importance_weights`: computes weights that correct for the difference between trainer and sampling
// engine, and a mask of the tokens that are kept. Rule numbers refer to docs/numerics.md; docs/objectives.md has the
// frameworks' names. Formulas are in fp32, in the order shown, with one rounding per operation; exp and expm1 come from
// math/. Minimum and maximum return their first operand unless the second is strictly better, so a NaN in the first
// operand stays.
//
// rlk/tokens.h defines slots, sequences and their sums. A token has d = fl(logprob - rollout_logprob) and
// c = min(max(d, -limit), limit). A sequence has n tokens, and sum() adds over the tokens of a sequence. With
// rollout_neutral, d is +0 where rollout_logprob is NaN, whatever logprob is. Such a token has weight 1, and no
// criterion on a single token rejects it.
//   weight     e = exp(min(max(z, -limit), limit)), where z is d for kToken, sum(d) for kSequence, sum(d) / n for
//              kGeometric.
//              w = min(max(e, low), high); with zero_outside w = e in [low, high] and 0 outside. policy_loss with the
//              same options in PolicySpec computes the same weights, bit for bit
//   kept       0 for a token that a given criterion rejects, 1 for all other tokens that count. k1 = -c, k2 = 0.5 c c,
//              k3 = max(expm1(c) - min(c, largest number), 0). Each of the next lines is a criterion, which rejects a
//              token that violates it:
//     token    k1 in token.k1, k2 <= token.k2, k3 <= token.k3
//     sum      -sum(c) in sum.k1, sum(k2) <= sum.k2, sum(k3) <= sum.k3 for the token's sequence
//     mean     -sum(c) / n in mean.k1, sum(k2) / n <= mean.k2, sum(k3) / n <= mean.k3 for the token's sequence
//     most     largest k2 of the token's sequence <= most.k2, largest k3 <= most.k3
//     veto     every d of the token's sequence >= veto_below
//   A bound that is not finite gives no criterion. A criterion also rejects a token if the compared value is NaN.
//   normalize  w = fl(w / mean). The mean is over tokens for kToken, else over sequences with a token. A weight of 0
//              stays 0. If mean <= 1e-8, no weight is divided. The mean also includes tokens that are not kept.
//   metrics    Computed from the weights w before normalize and from the ratios e, with u = fl(w - 1). N is the number
//              of tokens, S the number of sequences with a token. low' is low, or 1 / high where low is -Inf.
//              Over tokens: weight_mean = sum(w) / N; weight_std = sqrt(V / N) unscaled, with d and V of
//              kernels/tokens/central_moments.h; ess = 1 / (1 + ((V / N) / m) / m), where m is the scaled mean; ess is
//              0 where m is 0. Per sequence: its mean weight a = sum(w) / n and its deviation |sum(u) / n|.
//              seq_mean = sum(a) / S; seq_std = sqrt(V' / (S - 1)) unscaled. V' has the formula of V, with
//              d' = sum(d) / n + fl(m - fl(seq_mean scaled)) in place of d and S in place of N. V' is 0 for a single
//              sequence. V' is also 0 for equal weights, since V is 0. A sequence counts as low or high by its
//              sum(e) / n.
//              fraction_low, fraction_high: fraction with e < low', and fraction with e > high; over tokens for kToken,
//              else over sequences.
//              rejected: fraction of tokens that count and are not kept; fraction of sequences with such a token
// A masked token has weight +0 and kept 0. A NaN weight is the canonical NaN. No result depends on what a masked slot
// holds. Rejected tokens keep their weights. To leave them out, multiply the weights by `kept`, or use `kept` as the
// mask of later operators.
// The bits are the same for padded and packed sequences, for any strides, in any batch (except with normalize), and on
// every backend. The call enqueues its work on `stream`; it neither allocates nor synchronises.
#pragma once

#include <cstdint>
#include <limits>

#include "rlk/base.h"
#include "rlk/ops/policy_loss.h"

namespace rlk {

// An infinite value means no bound.
struct RejectionBounds {
  float k1_low = -std::numeric_limits<float>::infinity(), k1_high = std::numeric_limits<float>::infinity();
  float k2 = std::numeric_limits<float>::infinity(), k3 = std::numeric_limits<float>::infinity();
};

struct ImportanceSpec {
  ImportanceLevel level = ImportanceLevel::kToken;  // kToken, kSequence, kGeometric
  std::int32_t zero_outside = 0, normalize = 0;
  float low = 0.0f, high = 0.0f;  // -Inf, Inf: no bound
  float limit = 0.0f;             // > 0; Inf: no limit
  RejectionBounds token, sum, mean;
  RejectionBounds most;                                        // bounds on k2 and k3
  float veto_below = -std::numeric_limits<float>::infinity();  // bound on a log-ratio
  std::int32_t rollout_neutral = 0;
};

// The metrics, in the order of the output. If no token counts, all metrics are 0 except the divisor.
enum ImportanceMetric : int {
  kImportanceNumTokens,
  kImportanceNumSequences,  // sequences that have a token
  kImportanceWeightMean,
  kImportanceWeightStd,
  kImportanceWeightMin,
  kImportanceWeightMax,
  kImportanceRatioMin,
  kImportanceRatioMax,
  kImportanceFractionLow,
  kImportanceFractionHigh,
  kImportanceEss,
  kImportanceSeqMean,
  kImportanceSeqStd,
  kImportanceSeqMin,
  kImportanceSeqMax,
  kImportanceSeqDeviationMax,
  kImportanceSeqFractionLow,
  kImportanceSeqFractionHigh,
  kImportanceRejectedFraction,
  kImportanceSeqRejectedFraction,
  kImportanceDivisor,  // the divisor of normalize, else 1
  kImportanceMetrics,
};

struct ImportanceWeightsParams {
  Sequences sequences;
  PolicyTokens logprob;          // [slots]
  PolicyTokens rollout_logprob;  // [slots]
  TokenMask mask;                // [slots]; null: every token counts
  ImportanceSpec spec;
  float* weights = nullptr;   // [slots], contiguous
  float* kept = nullptr;      // [slots], contiguous: 1 or 0
  float* metrics = nullptr;   // [kImportanceMetrics], or null: not wanted
  void* workspace = nullptr;  // importance_weights_workspace_bytes(...), 16-byte aligned
};
std::int64_t importance_weights_workspace_bytes(const ImportanceWeightsParams& p, Device device);
// For bad offsets (docs/tokens.md) the CPU throws InvalidArgument. On a GPU the sequences next to a bad offset have NaN
// weights; with normalize, all sequences have NaN weights. The metrics are then NaN, and slots outside every sequence
// are not written.
void importance_weights(const ImportanceWeightsParams& p, Device device, Stream stream);

}  // namespace rlk
