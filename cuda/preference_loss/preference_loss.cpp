// CUDA backend of preference_loss: what would corrupt memory, which architecture's kernels run.
#include "rlk/ops/preference_loss.h"

#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/preference_loss_check.h"

namespace rlk::cuda {
namespace {

int checked_capability(int device) {
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("preference_loss: built for compute capability 8.0 and later");
  return capability;
}

}  // namespace

void preference_loss(const PreferenceLossParams& p, int device, Stream stream) {
  check_preference_loss(p);
  const DeviceGuard guard(device);
  checked_capability(device) == 90 ? preference_loss_sm90(p, to_stream(stream))
                                   : preference_loss_sm80(p, to_stream(stream));
}

void preference_loss_backward(const PreferenceLossBackwardParams& p, int device, Stream stream) {
  if (p.chosen.num + p.rejected.num == 0) return;
  const DeviceGuard guard(device);
  checked_capability(device) == 90 ? preference_loss_backward_sm90(p, to_stream(stream))
                                   : preference_loss_backward_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
