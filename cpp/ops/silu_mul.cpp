// Dispatch of silu_mul by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/silu_mul.h"

#include "cpp/cpu/silu_mul.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/silu_mul/silu_mul.h"
#endif
#if RLK_WITH_HIP
#include "hip/silu_mul/silu_mul.h"
#endif

namespace rlk {

void require_silu_mul_backend(Device device) { require_backend("silu_mul", device); }

void gated_mul(const GatedMulParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::gated_mul(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::gated_mul(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::gated_mul(p, device.index, stream);
#endif
  no_backend("silu_mul", device);
}

void gated_mul_backward(const GatedMulBackwardParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::gated_mul_backward(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::gated_mul_backward(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::gated_mul_backward(p, device.index, stream);
#endif
  no_backend("silu_mul", device);
}

}  // namespace rlk
