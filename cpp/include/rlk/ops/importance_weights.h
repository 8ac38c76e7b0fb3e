// THE CONTRACT of importance_weights: weights that correct a batch for the engine that sampled it, and which tokens are kept.
// Rules are those of docs/numerics.md; names of frameworks are in docs/objectives.md. Written formulas are fp32, one rounding
// an operation, in the order shown; exp and expm1 are those of math/. Minimum and maximum keep their first operand where the
// second is no improvement, and so a NaN in it.
//
// Sequences, sums: rlk/tokens.h. A token has d = fl(logprob - rollout_logprob), c = min(max(d, -limit), limit); n the
// number of a sequence's tokens, sum() over these.
// With rollout_neutral d is +0, whatever logprob is, where rollout_logprob is NaN: a weight of 1, of a token that no
// criterion refuses by itself.
//   weight     e = exp(z), z limited as c is: kToken d, kSequence sum(d), kGeometric sum(d) / n; w = min(max(e, low), high) or,
//              with zero_outside, e inside of [low, high] and 0 outside: the weights of PolicySpec, bit for bit
//   kept       a token that counts, unless a criterion that is given refuses it: k1 = -c, k2 = 0.5 c c, k3 = max(expm1(c) - min(c, largest number), 0)
//     token    k1 in token.k1, k2 <= token.k2, k3 <= token.k3
//     sum      of its sequence -sum(c) in sum.k1, sum(k2) <= sum.k2, sum(k3) <= sum.k3
//     mean     the same of these sums / n
//     most     the largest k2 <= most.k2, the largest k3 <= most.k3
//     veto     every d of its sequence >= veto_below
//   A bound that is not finite gives no criterion; where there is one, a NaN is refused.
//   normalize  w = fl(w / mean): of tokens where the weight is a token's, else of sequences that have a token; 0 stays 0; not
//              where mean <= 1e-8. Tokens count here whether they are kept or not.
//   metrics    of weights w before they are normalized and ratios e, u = fl(w - 1); N tokens, S sequences that have one; low' is
//              low, or 1 / high where that is -Inf. Over tokens weight_mean = sum(w) / N; weight_std = sqrt(V / N) unscaled,
//              d and V of rlk/kernels/central_moments.h; ess = 1 / (1 + ((V / N) / m) / m), m the scaled mean, 0 where m is.
//              Of a sequence a = sum(w) / n is its mean weight, |sum(u) / n| its deviation; seq_mean = sum(a) / S;
//              seq_std = sqrt(V' / (S - 1)) unscaled, V' as V but of d' = sum(d) / n + fl(m - fl(seq_mean scaled)) for d and S for
//              N, 0 where V is 0 for equal weights and of one sequence; it is low or high as sum(e) / n is.
//              fraction_low, fraction_high: e < low', e > high, of tokens where the weight is a token's, else of sequences.
//              rejected: tokens that count and are not kept, sequences with one of these
// Masked: weight +0, kept 0. NaN weights are canonical. Nothing in a masked slot decides a bit. Weights are not zeroed where
// a token is not kept: multiply, or take `kept` for the mask of what follows.
// Same bits for padded and packed sequences, any strides, in any batch (but for normalize), and on every backend. Enqueues on
// `stream`; neither allocates nor synchronises.
#pragma once

#include <cstdint>
#include <limits>

#include "rlk/base.h"
#include "rlk/ops/policy_loss.h"

namespace rlk {

// Infinite: none.
struct RejectionBounds {
  float k1_low = -std::numeric_limits<float>::infinity(), k1_high = std::numeric_limits<float>::infinity();
  float k2 = std::numeric_limits<float>::infinity(), k3 = std::numeric_limits<float>::infinity();
};

struct ImportanceSpec {
  ImportanceLevel level = ImportanceLevel::kToken;  // kToken, kSequence, kGeometric
  std::int32_t zero_outside = 0, normalize = 0;
  float low = 0.0f, high = 0.0f;  // -Inf, Inf: none
  float limit = 0.0f;             // > 0; Inf: none
  RejectionBounds token, sum, mean;
  RejectionBounds most;                                        // k2 and k3
  float veto_below = -std::numeric_limits<float>::infinity();  // bound on a log-ratio
  std::int32_t rollout_neutral = 0;
};

// The metrics, in the order of the output. Where no token counts, all are 0 except the divisor.
enum ImportanceMetric : int {
  kImportanceNumTokens,
  kImportanceNumSequences,  // that have a token
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
  kImportanceDivisor,  // what normalize divides by; else 1
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
// Bad offsets (docs/tokens.md) are an InvalidArgument on the CPU. On a GPU the sequences beside them have NaN weights, all
// sequences with normalize. Metrics are NaN then, and slots of no sequence are not written.
void importance_weights(const ImportanceWeightsParams& p, Device device, Stream stream);

}  // namespace rlk
