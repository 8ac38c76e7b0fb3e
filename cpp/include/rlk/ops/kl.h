// THE CONTRACT of kl: estimators of KL(policy, reference), one value per token, with gradients. Rule numbers refer to
// docs/numerics.md. Formulas are in fp32, in the order shown, with one rounding per operation; exp and expm1 come from
// math/. Minimum and maximum return their first operand unless the second is strictly better, so a NaN in the first
// operand stays.
//
// A token has l = logprob, f = ref_logprob; limited(x, limit) = min(max(x, -limit), limit):
//   e = limited(fl(f - l), input_limit)
//   k1: K = -e, K_l = 1; k2: (e / 2) e, -e; k3: expm1(e) - min(e, largest), -expm1(e); abs: |e|, -sign(e), which is NaN
//   for NaN
//   largest is the largest number, so K of an infinite e is an infinity
//   K_l = 0 where the input limit holds; with straight_through K_l = fl(l - f) even there
// Weight, with x * y = fl(x y), and +0 for zero times infinity:
//   kNone          value = K, slope = K_l
//   kOldLogprob    r = exp(fl(l - o)), o = weight: value = K * r, slope = fl(min(K, largest) + K_l) * r. The gradient
//                  flows through both factors. For k3, with K that of min(e, 80):
//     value        where e > 16: fl(G - min(r * fl(1 + e), largest)), G = exp(fl(f - o)). G overflows or underflows
//                  only where the value does. With the input limit G = exp(fl(fl(l - o) + e)), or exp(-Inf) if x is
//                  -Inf
//     slope        -(e * r), the exact slope of r (exp(e) - e - 1). Where the input limit holds, the slope is the value
//   kImportance    r = weight, a constant with respect to l: value = K * r, slope = K_l * r; slope along r: K
// kl = limited(value, limit). All slopes are 0 where |value| is beyond `limit`, but not where it equals it. With
// straight_through this limit sets no slope to 0.
// d_logprob = d_kl * slope, d_importance_weight = d_kl * K.
// These formulas are the KL term of policy_loss (ops/policy_loss.h); its kl_times_ratio is kOldLogprob with its own
// ratio. A token has the same bits at any position, in any batch, at any strides, and on every backend. Outputs of a
// masked token are +0, and no zero has a sign; NaN results are canonical. Nothing in a masked slot changes a bit.
// The call enqueues on `stream`; it neither allocates nor synchronises.
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
