// CUDA backend of importance_weights: what would corrupt memory, how work is cut, which architecture's kernels run.
#include "rlk/ops/importance_weights.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

std::int64_t importance_weights_workspace_bytes(const ImportanceWeightsParams& p, int) {
  return most_workspace_bytes<ImportanceBatch>(p.sequences);
}

void importance_weights(const ImportanceWeightsParams& p, int device, Stream stream) {
  check_importance_weights(p);
  RLK_CHECK(p.workspace, "importance_weights: a workspace is given");
  const DeviceGuard guard(device);
  const TokenPlan plan = choose_token_plan(p.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("importance_weights", device, importance_weights)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
