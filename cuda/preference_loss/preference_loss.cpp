// CUDA backend of preference_loss: checks memory safety, then calls the kernels for the GPU's architecture.
#include "rlk/ops/preference_loss.h"

#include "../common/kernels.h"
#include "kernels/losses/preference_loss_check.h"
#include "kernels/losses/preference_pair.h"
#include "rlk/backends.h"

namespace rlk::cuda {
void preference_loss(const PreferenceLossParams& p, int device, Stream stream) {
  check_preference_loss(p);
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("preference_loss", device, preference_loss)(p, to_stream(stream));
}

void preference_loss_backward(const PreferenceLossBackwardParams& p, int device, Stream stream) {
  check_preference_loss_backward(p);
  if (p.chosen.num + p.rejected.num == 0) return;
  const DeviceGuard guard(device);
  RLK_CUDA_IN_USE("preference_loss", device, preference_loss_backward)(p, to_stream(stream));
}

}  // namespace rlk::cuda
