// THE CONTRACT of value_loss: the clipped value loss of PPO, its gradient and metrics, in one pass over tokens. Rules are
// those of docs/numerics.md. Written formulas are fp32, one rounding an operation, in the order shown.
//
// Sequences, sums: rlk/tokens.h. A token has v = value, o = old_value, R = returns, c = clip, b = huber:
//   h(x)  = (x / 2) x where |x| <= b, else b (|x| - b / 2); h'(x) = x limited to +-b. b = Inf: the squared error
//   w     = fl(o - c) where v is below that, fl(o + c) where v is above that, else v
//   x     = fl(v - R), y = fl(w - R)
//   L     = h(y) where h(y) > h(x), else h(x); NaN where h(x) or h(y) is, or o
//   slope = h'(x) where w is v: as torch.clamp, whose bounds belong to the inside; else h'(x) where h(x) > h(y), 0 where
//           h(x) < h(y), and h'(x) / 2 where they are equal: as torch.maximum, which gives each of two equals half
//   c = Inf: no clip; o is not read
//   With token_weight u, of each token, L and slope become fl(u x). D and n count tokens all the same.
// Weight of a sequence's tokens: q = scale / D, / horizon where that is not 0, and / n with sequence_mean, n the number of
// the sequence's tokens; 0 where D or n is 0, NaN where D is
// negative, infinite or NaN. A weight of 0 gives 0, whatever it multiplies. D = denominator, else the number of tokens, of sequences, or of sequences
// that have a token. These are the aggregations of policy_loss.
// Loss: of each sequence sum(L) times its weight, summed over sequences. d_value = fl(weight slope); masked: +0.
// Same bits for padded and packed sequences, any strides, and on every backend; gradients, given a denominator, for any
// split of the batch. NaN results are canonical. Enqueues on `stream`; neither allocates nor synchronises.
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

// What comes out beside the loss, in this order. Means are over tokens; of no tokens they are 0.
enum ValueMetric : int {
  kValueMetricLoss,
  kValueMetricNumTokens,
  kValueMetricNumSequences,  // that have a token
  kValueMetricDenominator,   // D
  kValueMetricLossSum,       // over tokens, without their sequences' weights: these six; e = fl(R - v)
  kValueMetricValueSum,
  kValueMetricReturnSum,
  kValueMetricErrorSum,          // sum of e
  kValueMetricErrorSquaredSum,   // sum of fl(e e)
  kValueMetricReturnSquaredSum,  // sum of fl(R R)
  kValueMetricClipFraction,      // h(y) > h(x): verl's and TRL's
  kValueMetricOutsideFraction,   // w is not v: slime's
  kValueMetricValueMean,
  kValueMetricReturnMean,
  // 1 - V_e / V_R, V of rlk/kernels/central_moments.h: fl(1 - fl(fl(fl(V_e / V_R) u) u)), u the ratio of the scales of e and R. 0
  // where V_R is 0, which it is of equal returns; else 1 where V_e is.
  kValueMetricExplainedVariance,
  kValueMetrics,
};

struct ValueLossParams {
  Sequences sequences;
  PolicyTokens value;         // [slots]
  PolicyTokens old_value;     // [slots]; null exactly where clip is Inf
  PolicyTokens returns;       // [slots]
  PolicyTokens token_weight;  // [slots], or null: 1
  TokenMask mask;             // [slots], or null: every token counts
  ValueSpec spec;
  const float* denominator =
      nullptr;  // one element on the device, or null: denominator_value, of which 0 means counting
  float denominator_value = 0.0f;
  float* loss = nullptr;      // [1]
  float* metrics = nullptr;   // [kValueMetrics]
  float* d_value = nullptr;   // [slots], contiguous, or null: not wanted
  void* workspace = nullptr;  // value_loss_workspace_bytes(...), 16-byte aligned
};
std::int64_t value_loss_workspace_bytes(const ValueLossParams& p, Device device);
// Bad offsets (docs/tokens.md) are an InvalidArgument on the CPU; on a GPU the loss is NaN.
void value_loss(const ValueLossParams& p, Device device, Stream stream);

}  // namespace rlk
