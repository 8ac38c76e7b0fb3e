// CUDA backend of policy_loss for the product with gradients. The line of policy_loss in ../tokens/operators.inc
// defines the rest of the backend.
#include "rlk/ops/policy_loss.h"

#include "kernels.h"
#include "kernels/losses/policy_check.h"
#include "rlk/backends.h"

namespace rlk::cuda {

void scale_gradients(const ScaleGradientsParams& p, int device, Stream stream) {
  check_scale_gradients(p);
  if (p.count == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("policy_loss", device, scale_gradients)(p, to_stream(stream));
}

}  // namespace rlk::cuda
