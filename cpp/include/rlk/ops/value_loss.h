// THE CONTRACT of `value_loss`: the clipped value loss of PPO, its gradient and metrics, in one pass over tokens. Rule
// numbers refer to docs/numerics.md. Formulas are in fp32, in the order shown, with one rounding per operation.
//
// rlk/tokens.h defines slots, sequences and their sums. A token has v = value, o = old_value, R = returns, c = clip and
//   b = huber:
//   h(x)  = (x / 2) x where |x| <= b, else b (|x| - b / 2); h'(x) = x limited to +-b. With b = Inf this is the squared
//   error
//   w     = fl(o - c) where v is below it, fl(o + c) where v is above it, else v
//   x     = fl(v - R), y = fl(w - R)
//   L     = h(y) where h(y) > h(x), else h(x); NaN where h(x), h(y) or o is NaN
//   slope = h'(x) where w is v, as with torch.clamp, whose bounds count as inside. Otherwise h'(x) where h(x) > h(y), 0
//           where h(x) < h(y), and h'(x) / 2 where they are equal, as with torch.maximum, which gives each of two equal
//           operands half of the gradient.
//   c = Inf: no clip; o is not read
//   With token_weight u of each token, L and slope become fl(u x). D and n still count every token.
// Weight of a sequence's tokens: q = scale / D, divided by `horizon` if `horizon` is not 0, and divided by n with
// sequence_mean, where n is the number of the sequence's tokens that count. q is 0 where D or n is 0, and NaN where D
// is negative, subnormal, infinite or NaN. A product with a weight of 0 is 0, even if the other factor is infinite or
// NaN. D is `denominator` if the caller gives one, else the number of tokens, of sequences, or of sequences that have a
// token. policy_loss computes its weights in the same way.
// Loss: each sequence's sum(L) times its weight, summed over sequences. d_value = fl(weight slope); masked tokens have
// +0.
// The bits are the same for padded and packed sequences, for any strides and on every backend. Given a denominator,
// gradients have the same bits for any split of the batch. Every NaN result is the canonical NaN. The call enqueues its
// work on `stream`; it neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

struct ValueSpec {
  float clip = 0.0f, huber = 0.0f;  // Inf: none
  DenominatorKind denominator = DenominatorKind::kTokens;
  std::int32_t sequence_mean = 0;
  float horizon = 0.0f, scale = 1.0f;
};

// Elements of `metrics`, in this order. Means are over tokens, and are 0 if no token counts.
enum ValueMetric : int {
  kValueMetricLoss,
  kValueMetricNumTokens,
  kValueMetricNumSequences,  // sequences that have a token
  kValueMetricDenominator,   // D
  // This metric and the next five are over tokens, without the sequences' weights; e = fl(R - v).
  kValueMetricLossSum,
  kValueMetricValueSum,
  kValueMetricReturnSum,
  kValueMetricErrorSum,          // sum of e
  kValueMetricErrorSquaredSum,   // sum of fl(e e)
  kValueMetricReturnSquaredSum,  // sum of fl(R R)
  kValueMetricClipFraction,      // fraction with h(y) > h(x), as in verl and TRL
  kValueMetricOutsideFraction,   // fraction where w is not v, as in slime
  kValueMetricValueMean,
  kValueMetricReturnMean,
  // 1 - V_e / V_R, with V of kernels/tokens/central_moments.h: fl(1 - fl(fl(fl(V_e / V_R) u) u)), where u is the ratio
  // of the scales of e and R. The metric is 0 where V_R is 0, as for equal returns, else 1 where V_e is 0. It is NaN
  // where a value or a return is infinite or NaN.
  kValueMetricExplainedVariance,
  kValueMetrics,
};

struct ValueLossParams {
  Sequences sequences;
  PolicyTokens value;         // [slots]
  PolicyTokens old_value;     // [slots]; null if and only if clip is Inf
  PolicyTokens returns;       // [slots]
  PolicyTokens token_weight;  // [slots], or null: 1
  TokenMask mask;             // [slots], or null: every token counts
  ValueSpec spec;
  const float* denominator = nullptr;  // one element on the device, or null: denominator_value
  float denominator_value = 0.0f;      // 0: spec.denominator decides
  float* loss = nullptr;               // [1]
  float* metrics = nullptr;            // [kValueMetrics]
  float* d_value = nullptr;            // [slots], contiguous, or null: not wanted
  void* workspace = nullptr;           // value_loss_workspace_bytes(...), 16-byte aligned
};
std::int64_t value_loss_workspace_bytes(const ValueLossParams& p, Device device);
// For bad offsets (docs/tokens.md) the CPU throws InvalidArgument. On a GPU bad offsets make the loss NaN.
void value_loss(const ValueLossParams& p, Device device, Stream stream);

}  // namespace rlk
