// CUDA backend of value_loss: what would corrupt memory, how work is cut, which architecture's kernels run.
#include "rlk/ops/value_loss.h"

#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/value_check.h"

namespace rlk::cuda {

std::int64_t value_loss_workspace_bytes(const ValueLossParams& p, int) {
  return most_workspace_bytes<ValueBatch>(p.sequences);
}

void value_loss(const ValueLossParams& p, int device, Stream stream) {
  check_value_loss(p);
  RLK_CHECK(p.workspace, "value_loss: a workspace is given");
  const DeviceGuard guard(device);
  const TokenPlan plan = choose_token_plan(p.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("value_loss", device, value_loss)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
