// The importance weight of the rollout for a token or a sequence, shared by policy_loss and importance_weights.
#pragma once

#include "kernels/tokens/terms.h"
#include "rlk/math/exp.h"

namespace rlk {

// fl(x - y) for two log-probabilities x and y, one of which may be NaN. `missing` is that one. With `neutral` the
// result for a NaN is +0, so the ratio is 1.
template <class F>
RLK_HD F rollout_log_ratio(bool neutral, F x, F y, F missing) {
  const F d = sub_rn(x, y);
  return neutral ? select(is_nan(missing), broadcast<F>(0.0f), d) : d;
}

// The rollout's log-probability. With `neutral`, the trainer's log-probability replaces a NaN.
template <class F>
RLK_HD F rollout_or(bool neutral, F rollout, F trainer) {
  return neutral ? select(is_nan(rollout), trainer, rollout) : rollout;
}

struct ImportanceBounds {
  float low, high, limit;
  bool zero_outside;  // true: values outside [low, high] become 0; false: they become the nearest bound
};
template <class F>
struct ImportanceWeight {
  F weight;
  MaskOf<F> clipped;
};
template <class F>
RLK_HD ImportanceWeight<F> limited_weight(const ImportanceBounds& b, F e) {
  const F w = b.zero_outside ? inside_or(e, b.low, b.high, e, broadcast<F>(0.0f)) : clamped(e, b.low, b.high);
  return {w, MaskOf<F>((w < e) | (w > e))};
}
template <class F>
RLK_HD ImportanceWeight<F> importance_of_log(const ImportanceBounds& b, F d) {
  return limited_weight(b, exp(clamped(d, -b.limit, b.limit)));
}

}  // namespace rlk
