// The kernels of importance_weights on GPUs of every vendor that are not in kernels/tokens/passes.h.
#pragma once

#include "kernels/losses/rejection_terms.h"
#include "kernels/tokens/passes.h"

namespace rlk {

// The normalization of weights: block `block` of `blocks` divides its share of the weights by the mean weight. If the
// mean is 1, the block returns without reading weights.
template <class Gpu>
RLK_DEVICE void importance_divide(const ImportanceWeightsParams& p, const TokenWorkspace<ImportanceBatch>& w,
                                  std::int64_t count, std::int64_t block, std::int64_t blocks) {
  const float divisor = in_global(w.shared)->divisor;
  if (divisor == 1.0f) return;
  map_values<Gpu>(p.weights, count, block, blocks, [&](const auto& x) { return normalized(x, divisor); });
}

}  // namespace rlk
