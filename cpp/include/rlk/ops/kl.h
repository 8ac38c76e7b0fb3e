// THE CONTRACT of kl: estimators of KL(policy, reference), a value a token, with gradients. Rules are those of
// docs/numerics.md. Written formulas are fp32, one rounding an operation, in the order shown; exp and expm1 are those of
// math/. Minimum and maximum keep their first operand where the second is no improvement, and so a NaN in it.
//
// A token has l = logprob, f = ref_logprob; limited(x, limit) = min(max(x, -limit), limit):
//   e = limited(fl(f - l), input_limit)
//   k1: K = -e, K_l = 1; k2: K = (e / 2) e, -e; k3: expm1(e) - min(e, largest), -expm1(e); abs: |e|, -sign(e), NaN of NaN
//   largest: the largest number, so that K of an infinite e is an infinity
//   K_l = 0 where the input limit holds; with straight_through K_l = fl(l - f) whatever holds
// Weight, x * y being fl(x y), and +0 of a zero and an infinity:
//   kNone          value = K, slope = K_l
//   kOldLogprob    r = exp(fl(l - o)), o = weight: value = K * r, slope = fl(min(K, largest) + K_l) * r: through both.
//                  For k3, with K that of min(e, 80):
//     value        where e > 16 fl(G - min(r * fl(1 + e), largest)), G = exp(fl(f - o)), which neither overflows nor
//                  underflows where the value does not; with the input limit G = exp(fl(fl(l - o) + e)), or
//                  exp(-Inf) of an x that is -Inf
//     slope        -(e * r), which is exactly that of r (exp(e) - e - 1); where the input limit holds the value
//   kImportance    r = weight, a constant of l: value = K * r, slope = K_l * r; slope along r: K
// kl = limited(value, limit); all slopes are 0 where that limit holds, which it does beyond it, not on it; with
// straight_through none is.
// d_logprob = d_kl * slope, d_importance_weight = d_kl * K.
// These are the KL term of policy_loss (ops/policy_loss.h), whose kl_times_ratio is kOldLogprob with its own ratio.
// A token has the same bits at any position, in any batch, at any strides, and on every backend. Outputs of a masked token
// are +0, and no zero has a sign; NaN results are canonical. Nothing in a masked slot decides a bit.
// Enqueues on `stream`; neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

enum class KlEstimator : std::int32_t { kNone, kK1, kK2, kK3, kAbs };  // kNone: of policy_loss alone
enum class KlWeight : std::int32_t { kNone, kOldLogprob, kImportance };

struct KlSpec {
  KlEstimator estimator = KlEstimator::kK1;
  std::int32_t straight_through = 0;
  KlWeight weight = KlWeight::kNone;
  float input_limit = 0.0f, limit = 0.0f;  // Inf: none
};

// Rows of tokens, padded; packed tokens are one row: nothing is summed.
struct KlParams {
  Sequences sequences;       // cu_seqlens is null
  PolicyTokens logprob;      // [slots]
  PolicyTokens ref_logprob;  // [slots]
  PolicyTokens weight;       // [slots], null exactly where spec.weight is kNone
  PolicyTokens d_kl;         // [slots], given for gradients
  TokenMask mask;            // [slots], or null: every token counts
  KlSpec spec;
  float* kl = nullptr;                   // [slots], contiguous, or null: not wanted; so for all outputs
  float* d_logprob = nullptr;            // [slots]
  float* d_importance_weight = nullptr;  // [slots]; of kImportance
};
void kl(const KlParams& p, Device device, Stream stream);

}  // namespace rlk
