// The importance weight of rollout, of a token or of a sequence: shared by policy_loss and importance_weights.
#pragma once

#include "rlk/kernels/token_terms.h"
#include "rlk/math/exp.h"

namespace rlk {

struct ImportanceBounds {
  float low, high, limit;
  bool zero_outside;  // else the nearest bound
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
