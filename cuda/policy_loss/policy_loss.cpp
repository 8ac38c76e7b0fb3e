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
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("policy_loss: built for compute capability 8.0 and later");
  const TokenPlan plan = choose_policy_plan(p, multiprocessors(device));
  capability == 90 ? policy_loss_sm90(p, plan, to_stream(stream)) : policy_loss_sm80(p, plan, to_stream(stream));
}

void scale_gradients(const ScaleGradientsParams& p, int device, Stream stream) {
  if (p.count == 0) return;
  const DeviceGuard guard(device);
  compute_capability(device) == 90 ? scale_gradients_sm90(p, to_stream(stream))
                                   : scale_gradients_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
