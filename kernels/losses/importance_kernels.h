// Kernels of importance_weights on GPUs of every vendor, besides the passes of kernels/tokens/passes.h.
#pragma once

#include "kernels/losses/rejection_terms.h"
#include "kernels/tokens/passes.h"

namespace rlk {

// Normalization: block `block` of `blocks` divides its weights by the mean. If the divisor is 1, nothing is read.
template <class Gpu>
RLK_DEVICE void importance_divide(const ImportanceWeightsParams& p, const TokenWorkspace<ImportanceBatch>& w,
                                  std::int64_t count, std::int64_t block, std::int64_t blocks) {
  const float divisor = in_global(w.shared)->divisor;
  if (divisor == 1.0f) return;
  map_values<Gpu>(p.weights, count, block, blocks, [&](const auto& x) { return normalized(x, divisor); });
}

}  // namespace rlk
