// THE CONTRACT of `kl`: estimators of KL(policy, reference), one value per token, with gradients. Rule numbers refer to
// docs/numerics.md. Formulas are in fp32, in the order shown, with one rounding per operation; exp and expm1 come from
// math/. Minimum and maximum return their first operand unless the second is strictly better, so a NaN in the first
// operand stays.
//
// A token has l = logprob, f = ref_logprob; limited(x, limit) = min(max(x, -limit), limit):
//   e = limited(fl(f - l), input_limit)
//   k1: K = -e, K_l = 1; k2: K = (e / 2) e, K_l = -e; k3: K = expm1(e) - min(e, largest), K_l = -expm1(e);
//   abs: K = |e|, K_l = -sign(e), which is NaN for a NaN e.
//   `largest` is the largest finite number, so K of an infinite e is an infinity and not NaN.
//   K_l = 0 where input_limit cuts e; with straight_through K_l = fl(l - f) for every e.
// Weight. Here x * y is fl(x y), but +0 for zero times infinity:
//   kNone          value = K, slope = K_l
//   kOldLogprob    r = exp(fl(l - o)), o = weight: value = K * r, slope = fl(min(K, largest) + K_l) * r. The gradient
//                  flows through both factors, K and r. For k3, K is that of min(e, 80). For k3 without
//                  straight_through, the next two formulas take precedence:
//     value        where e > 16: fl(G - min(r * fl(1 + e), largest)), G = exp(fl(f - o)). G overflows or underflows
//                  only where the value does. Where input_limit cuts e, G = exp(fl(fl(l - o) + e)), or exp(-Inf) if
//                  fl(l - o) is -Inf
//     slope        -(e * r), the exact slope of r (exp(e) - e - 1). Where input_limit cuts e, the slope is the value
//   kImportance    r = weight, a constant with respect to l: value = K * r, slope = K_l * r; the slope along r is K
// kl = limited(value, limit). All slopes are 0 where |value| > limit, but not where |value| = limit. With
// straight_through, `limit` sets no slope to 0.
// d_logprob = d_kl * slope, d_importance_weight = d_kl * K.
// policy_loss uses these formulas for its KL term (ops/policy_loss.h). Its option kl_times_ratio is kOldLogprob with
// the ratio of policy_loss. A token has the same bits at any position, in any batch, at any strides, and on every
// backend. Outputs of a masked token are +0, every zero is +0, and every NaN result is the canonical NaN. No result
// depends on what a masked slot holds.
// The call enqueues its work on `stream`; it neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

enum class KlEstimator : std::int32_t { kNone, kK1, kK2, kK3, kAbs };  // kNone is for policy_loss alone
enum class KlWeight : std::int32_t { kNone, kOldLogprob, kImportance };

struct KlSpec {
  KlEstimator estimator = KlEstimator::kK1;
  std::int32_t straight_through = 0;
  KlWeight weight = KlWeight::kNone;
  float input_limit = 0.0f, limit = 0.0f;  // Inf: no limit
};

// The tokens are the rows of a padded array. Packed tokens are passed as one row, since nothing is summed.
struct KlParams {
  Sequences sequences;       // cu_seqlens must be null
  PolicyTokens logprob;      // [slots]
  PolicyTokens ref_logprob;  // [slots]
  PolicyTokens weight;       // [slots], null exactly where spec.weight is kNone
  PolicyTokens d_kl;         // [slots], given to get gradients
  TokenMask mask;            // [slots], or null: every token counts
  KlSpec spec;
  float* kl = nullptr;                   // every output: [slots], contiguous; null: not wanted
  float* d_logprob = nullptr;            // [slots]
  float* d_importance_weight = nullptr;  // [slots]; for kImportance
};
void kl(const KlParams& p, Device device, Stream stream);

}  // namespace rlk
