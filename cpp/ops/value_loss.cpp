// Dispatch of value_loss by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/value_loss.h"

#include "cpp/cpu/value_loss.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/value_loss/value_loss.h"
#endif
#if RLK_WITH_HIP
#include "hip/value_loss/value_loss.h"
#endif

namespace rlk {

void require_value_loss_backend(Device device) { require_backend("value_loss", device); }

std::int64_t value_loss_workspace_bytes([[maybe_unused]] const ValueLossParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::value_loss_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::value_loss_workspace_bytes(p);
#endif
  no_backend("value_loss", device);
}

void value_loss(const ValueLossParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::value_loss(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::value_loss(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::value_loss(p, device.index, stream);
#endif
  no_backend("value_loss", device);
}

}  // namespace rlk
