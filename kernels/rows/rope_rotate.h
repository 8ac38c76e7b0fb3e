// The formulas of ops/rope.h that every backend shares. The templates also work on the vectors of cpu/simd.h.
#pragma once

#include "rlk/math/ieee.h"
#include "rlk/ops/rope.h"

namespace rlk {

// The section whose position ids select the angle of a pair.
RLK_HD int rope_section(const RopeParams& p, std::int64_t pair) {
  if (p.num_sections == 1) return 0;
  return pair < p.section_pairs[0] ? 0 : pair < p.section_pairs[0] + p.section_pairs[1] ? 1 : 2;
}

// The cosines and sines that rotate a pair (a, b).
template <class F>
struct RopeAngle {
  F cos_a, sin_a, cos_b, sin_b;
};

// Rotates the pair (a, b). The results are not yet rounded to the pair's type.
template <class F>
RLK_HD void rope_rotate(const RopeAngle<F>& angle, F* a, F* b) {
  const F first = fma_rn(*a, angle.cos_a, -mul_rn(*b, angle.sin_a));
  *b = fma_rn(*b, angle.cos_b, mul_rn(*a, angle.sin_b));
  *a = first;
}

// Rotates the pair (a, b) under the option round_products, which rounds each product. `rounded` rounds a value to the
// pair's type.
template <class F, class Rounded>
RLK_HD void rope_rotate_rounded(const RopeAngle<F>& angle, const Rounded& rounded, F* a, F* b) {
  const F first = sub_rn(rounded(mul_rn(*a, angle.cos_a)), rounded(mul_rn(*b, angle.sin_a)));
  *b = add_rn(rounded(mul_rn(*b, angle.cos_b)), rounded(mul_rn(*a, angle.sin_b)));
  *a = first;
}

}  // namespace rlk
