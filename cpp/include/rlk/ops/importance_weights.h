// THE CONTRACT of importance_weights: weights that correct a batch for the engine that sampled it, and a mask of the
// tokens that are kept. Rule numbers refer to docs/numerics.md; docs/objectives.md has the frameworks' names. Formulas
// are in fp32, in the order shown, with one rounding per operation; exp and expm1 come from math/. Minimum and
// maximum return their first operand unless the second is strictly better, so a NaN in the first operand stays.
//
// rlk/tokens.h defines sequences and their sums. A token has d = fl(logprob - rollout_logprob) and
// c = min(max(d, -limit), limit). A sequence has n tokens, and sum() adds over these. With rollout_neutral, d is +0
// where rollout_logprob is NaN, whatever logprob is. Such a token has weight 1, and no criterion on a single token
// rejects it.
//   weight     e = exp(z), z limited as c is: kToken d, kSequence sum(d), kGeometric sum(d) / n.
//              w = min(max(e, low), high); with zero_outside w = e in [low, high] and 0 outside. These are the weights
//              of PolicySpec, bit for bit
//   kept       1 for a token that counts, unless a given criterion rejects it. k1 = -c, k2 = 0.5 c c,
//              k3 = max(expm1(c) - min(c, largest number), 0)
//     token    k1 in token.k1, k2 <= token.k2, k3 <= token.k3
//     sum      for its sequence -sum(c) in sum.k1, sum(k2) <= sum.k2, sum(k3) <= sum.k3
//     mean     the same for these sums / n
//     most     the sequence's largest k2 <= most.k2, its largest k3 <= most.k3
//     veto     every d of its sequence >= veto_below
//   A bound that is not finite gives no criterion. A given criterion rejects a NaN.
//   normalize  w = fl(w / mean): the mean over tokens for a weight per token, else over sequences with a token. 0 stays
//              0. Nothing is divided where mean <= 1e-8. Tokens enter the mean whether they are kept or not.
//   metrics    Taken of the weights w before they are normalized and of the ratios e; u = fl(w - 1). N is the number of
//              tokens, S the number of sequences with a token. low' is low, or 1 / high where low is -Inf.
//              Over tokens: weight_mean = sum(w) / N; weight_std = sqrt(V / N) unscaled, d and V of
//              kernels/tokens/central_moments.h; ess = 1 / (1 + ((V / N) / m) / m), m the scaled mean; 0 where m is 0.
//              Per sequence: its mean weight a = sum(w) / n and its deviation |sum(u) / n|. seq_mean = sum(a) / S;
//              seq_std = sqrt(V' / (S - 1)) unscaled. V' is V with d' = sum(d) / n + fl(m - fl(seq_mean scaled)) for d
//              and S for N. V' is 0 for a single sequence, and for equal weights, where V is 0. A sequence is low or
//              high as its sum(e) / n is.
//              fraction_low, fraction_high: fraction with e < low', with e > high; over tokens for a weight per token,
//              else over sequences.
//              rejected: fraction of tokens that count and are not kept; fraction of sequences with such a token
// A masked token has weight +0 and kept 0. NaN weights are canonical. Nothing in a masked slot changes a bit. Rejected
// tokens keep their weights: multiply by `kept`, or use it as the mask of later operators.
// The bits are the same for padded and packed sequences, for any strides, in any batch (except with normalize), and on
// every backend. The call enqueues on `stream`; it neither allocates nor synchronises.
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
// Bad offsets (docs/tokens.md) are an InvalidArgument on the CPU. On a GPU the sequences next to a bad offset have NaN
// weights; with normalize all sequences do. The metrics are then NaN, and slots outside every sequence are not written.
void importance_weights(const ImportanceWeightsParams& p, Device device, Stream stream);

}  // namespace rlk
