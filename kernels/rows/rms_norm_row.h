// The formulas of ops/rms_norm.h that every backend shares. The templates also work on the vectors of cpu/simd.h.
#pragma once

#include "rlk/math/ieee.h"
#include "rlk/ops/rms_norm.h"

namespace rlk {

// The number of groups into which rule 9 (docs/numerics.md) splits rows. The last group may be short.
RLK_HD std::int64_t rms_norm_groups(std::int64_t num_rows) {
  return (num_rows + kRmsNormGroupRows - 1) / kRmsNormGroupRows;
}

// For an empty row, the sum and the mean are +0.
RLK_HD float rms_norm_rstd(float sum_of_squares, std::int64_t columns, float eps) {
  const float mean = columns == 0 ? 0.0f : div_rn(sum_of_squares, static_cast<float>(columns));
  return div_rn(1.0f, sqrt_rn(add_rn(mean, eps)));
}

template <class F>
RLK_HD F rms_norm_weight(F weight, float offset) {
  return offset == 0.0f ? weight : add_rn(weight, broadcast<F>(offset));
}

template <class F>
RLK_HD F rms_norm_dx(F g, F xhat, F c, F rstd, F d_new_residual) {
  return fma_rn(rstd, fma_rn(-xhat, c, g), d_new_residual);
}

}  // namespace rlk
