// CUDA backend of policy_loss: what would corrupt memory, how work is cut, which architecture's kernels run.
#include "rlk/ops/policy_loss.h"

#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/policy_check.h"

namespace rlk::cuda {

std::int64_t policy_loss_alone_workspace_bytes(const PolicyLossParams& p, int) {
  return most_workspace_bytes<PolicyBatch>(p.sequences);
}

void policy_loss_alone(const PolicyLossParams& p, int device, Stream stream) {
  check_policy_loss(p);
  RLK_CHECK(p.workspace, "policy_loss: a workspace is given");
  const DeviceGuard guard(device);
  const TokenPlan plan = choose_policy_plan(p, multiprocessors(device));
  RLK_CUDA_IN_USE("policy_loss", device, policy_loss)(p, plan, to_stream(stream));
}

void scale_gradients(const ScaleGradientsParams& p, int device, Stream stream) {
  if (p.count == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("policy_loss", device, scale_gradients)(p, to_stream(stream));
}

}  // namespace rlk::cuda
