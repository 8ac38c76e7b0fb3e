// Every backend checks these preconditions of a kl call, because a violation would corrupt memory. Users' input is
// checked earlier, by the bindings.
#pragma once

#include "kernels/losses/policy_check.h"
#include "rlk/ops/kl.h"

namespace rlk {

inline void check_kl(const KlParams& p) {
  check_sequences(p.sequences, p.mask, "kl");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(!p.sequences.packed(), "kl: tokens are rows");
  RLK_CHECK(p.spec.estimator != KlEstimator::kNone, "kl: an estimator is given");
  RLK_CHECK(p.logprob.data && p.logprob.token_stride == 1, "kl: logprob is given, one a token");
  RLK_CHECK(p.ref_logprob.data && p.ref_logprob.token_stride == 1, "kl: ref_logprob is given, one a token");
  RLK_CHECK((p.weight.data != nullptr) == (p.spec.weight != KlWeight::kNone) && p.weight.token_stride == 1,
            "kl: a weight is given, one a token, with its kind");
  RLK_CHECK(p.d_kl.token_stride == 1 && (p.d_kl.data || (!p.d_logprob && !p.d_importance_weight)),
            "kl: d_kl is given, one a token, for gradients");
  RLK_CHECK(p.d_importance_weight == nullptr || p.spec.weight == KlWeight::kImportance,
            "kl: d_importance_weight needs an importance weight");
}

// If there are no gaps between rows, merges them into one row, so that vectors may cross the ends of rows.
inline KlParams as_one_row(KlParams p) {
  const std::int64_t n = p.sequences.num_tokens;
  for (const PolicyTokens* a : {&p.logprob, &p.ref_logprob, &p.weight, &p.d_kl}) {
    if (a->data != nullptr && a->sequence_stride != n) return p;
  }
  if (p.mask.data != nullptr && p.mask.row_stride != n) return p;
  if (p.sequences.num_slots() >= std::int64_t{1} << 33) return p;
  p.sequences = {nullptr, DType::kInt32, 1, p.sequences.num_slots()};
  return p;
}

}  // namespace rlk
