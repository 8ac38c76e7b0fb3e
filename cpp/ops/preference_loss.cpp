// Dispatch of preference_loss by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/preference_loss.h"

#include "cpp/cpu/preference_loss.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/preference_loss/preference_loss.h"
#endif
#if RLK_WITH_HIP
#include "hip/preference_loss/preference_loss.h"
#endif

namespace rlk {

void require_preference_loss_backend(Device device) { require_backend("preference_loss", device); }

void preference_loss(const PreferenceLossParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::preference_loss(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::preference_loss(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::preference_loss(p, device.index, stream);
#endif
  no_backend("preference_loss", device);
}

void preference_loss_backward(const PreferenceLossBackwardParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::preference_loss_backward(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::preference_loss_backward(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::preference_loss_backward(p, device.index, stream);
#endif
  no_backend("preference_loss", device);
}

}  // namespace rlk
