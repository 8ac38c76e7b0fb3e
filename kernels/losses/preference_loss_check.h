// Every backend checks these preconditions of a preference_loss call, because a violation would corrupt memory. Users'
// input is checked earlier, by the bindings.
#pragma once

#include "rlk/ops/preference_loss.h"

namespace rlk {

inline void check_preference_loss(const PreferenceLossParams& p) {
  const bool pairs = p.kind != Preference::kKto;
  RLK_CHECK(p.chosen.num >= 0 && p.chosen.num < std::int64_t{1} << 30, "preference_loss: fewer than 2^30 pairs");
  RLK_CHECK(p.rejected.num >= 0 && p.rejected.num < std::int64_t{1} << 30, "preference_loss: fewer than 2^30 pairs");
  RLK_CHECK(!pairs || p.chosen.num == p.rejected.num, "preference_loss: as many chosen as rejected");
  RLK_CHECK((p.chosen.reference == nullptr) == (p.rejected.reference == nullptr) ||
                p.chosen.num + p.rejected.num == 0 || !pairs,
            "preference_loss: references of both sides or of none");
  RLK_CHECK(p.sort == PreferenceSort::kNone || p.chosen.num == 0 ||
                (p.ranks && p.order && p.chosen.reference && p.rejected.reference),
            "preference_loss: sorting needs references, ranks and memory");
  RLK_CHECK(p.metrics != nullptr, "preference_loss: metrics is given");
}

inline void check_preference_loss_backward(const PreferenceLossBackwardParams& p) {
  RLK_CHECK(p.chosen.num >= 0 && p.rejected.num >= 0 && p.num_losses >= 0,
            "preference_loss_backward: sizes are not negative");
}

}  // namespace rlk
