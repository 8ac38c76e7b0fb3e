// Powers of two that scale means and variances, so that neither sums nor squares overflow or underflow. The powers
// depend only on the values, not on their order. Scaling by these powers is exact, except for results far below the
// largest value.
#pragma once

#include "rlk/math/ieee.h"

namespace rlk {

// With 2^k <= max(|least|, |largest|) < 2^(k + 1), k limited to [-126, 126]:
struct MomentScale {
  float down = 1.0f;                                      // 2^-max(k, 0)
  float up = 1.0f;                                        // 2^-min(k, 0)
  RLK_HD float both() const { return mul_rn(down, up); }  // 2^-k
};
RLK_HD float power_of_two(std::int32_t k) { return float_of((k + 127) << 23); }  // k in [-126, 127]
// Takes the least and the largest of the values that are not NaN.
RLK_HD MomentScale moment_scale(float least, float largest) {
  const float a = abs_of(least), b = abs_of(largest);
  std::int32_t k = (bits_of(a > b ? a : b) >> 23) - 127;
  k = k < -126 ? -126 : k > 126 ? 126 : k;
  MomentScale s;
  s.down = power_of_two(k > 0 ? -k : 0);
  s.up = power_of_two(k < 0 ? -k : 0);
  return s;
}
// 1 / scale, x / scale and x / scale^2 for one of these scales.
RLK_HD float inverse_of(float scale) { return float_of((254 << 23) - bits_of(scale)); }
RLK_HD float unscaled(float x, float scale) { return mul_rn(x, inverse_of(scale)); }
RLK_HD float unscaled_square(float x, float scale) { return unscaled(unscaled(x, scale), scale); }

}  // namespace rlk
