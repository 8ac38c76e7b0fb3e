// Every backend checks these preconditions of a value_loss call, because a violation would corrupt memory. Users' input
// is checked earlier, by the bindings.
#pragma once

#include "kernels/losses/policy_check.h"
#include "rlk/ops/value_loss.h"

namespace rlk {

inline void check_value_loss(const ValueLossParams& p) {
  check_sequences(p.sequences, p.mask, "value_loss");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.value.data && p.value.token_stride == 1, "value_loss: value is given, one a token");
  RLK_CHECK(p.returns.data && p.returns.token_stride == 1, "value_loss: returns is given, one a token");
  RLK_CHECK(p.token_weight.data == nullptr || p.token_weight.token_stride == 1,
            "value_loss: token_weight has one a token");
  RLK_CHECK((p.old_value.data != nullptr) == (p.spec.clip < infinity()) && p.old_value.token_stride == 1,
            "value_loss: old_value is given, one a token, with a clip");
}

}  // namespace rlk
