// Dispatch of rms_norm by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/rms_norm.h"

#include "cpp/cpu/rms_norm.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/rms_norm/rms_norm.h"
#endif
#if RLK_WITH_HIP
#include "hip/rms_norm/rms_norm.h"
#endif

namespace rlk {

void require_rms_norm_backend(Device device) { require_backend("rms_norm", device); }

void rms_norm(const RmsNormParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::rms_norm(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::rms_norm(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::rms_norm(p, device.index, stream);
#endif
  no_backend("rms_norm", device);
}

std::int64_t rms_norm_backward_workspace_bytes([[maybe_unused]] const RmsNormBackwardParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::rms_norm_backward_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::rms_norm_backward_workspace_bytes(p);
#endif
  no_backend("rms_norm", device);
}

void rms_norm_backward(const RmsNormBackwardParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::rms_norm_backward(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::rms_norm_backward(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::rms_norm_backward(p, device.index, stream);
#endif
  no_backend("rms_norm", device);
}

}  // namespace rlk
