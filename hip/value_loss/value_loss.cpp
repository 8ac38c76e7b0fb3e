// The host side of value_loss on HIP checks memory safety and chooses the kernels.
#include "rlk/ops/value_loss.h"

#include "hip/tokens/passes.h"
#include "kernels/losses/value_check.h"
#include "kernels/losses/value_terms.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t value_loss_workspace_bytes(const ValueLossParams& p, int) {
  return token_workspace<ValueBatch>(p.sequences, nullptr).bytes;
}

void value_loss(const ValueLossParams& p, int device, Stream stream) {
  check_value_loss(p);
  RLK_CHECK(p.workspace, "value_loss: a workspace is given");
  run_token_passes<ValueBatch>(p, device, stream, "rlk_value_loss", "rlk_value_loss_tokens");
  if (p.metrics == nullptr) return;
  run_token_passes<ValueMomentsBatch>(p, device, stream, "rlk_value_loss_moments", "rlk_value_loss_moments_tokens");
}

}  // namespace rlk::hip
