// The kernels of policy_loss on GPUs of every vendor that are not in kernels/tokens/passes.h.
#pragma once

#include "kernels/losses/policy_batch.h"
#include "kernels/tokens/passes.h"

namespace rlk {

// Block `block` of `blocks` multiplies its values by the factor. If the factor is 1, the block returns without reading
// values.
template <class Gpu>
RLK_DEVICE void scale_values(const ScaleGradientsParams& p, std::int64_t block, std::int64_t blocks) {
  const float factor = *in_global(p.factor);
  if (factor == 1.0f) return;
  for (float* const values : {p.first, p.second}) {
    map_values<Gpu>(values, p.count, block, blocks, [&](const auto& x) {
      using F = std::decay_t<decltype(x)>;
      return canonical(mul_rn(x, broadcast<F>(factor)));
    });
  }
}

}  // namespace rlk
