// Dispatch of pack by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/pack.h"

#include "cpp/cpu/pack.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/pack/pack.h"
#endif
#if RLK_WITH_HIP
#include "hip/pack/pack.h"
#endif

namespace rlk {

void require_pack_backend(Device device) { require_backend("pack", device); }

void pack_layout(const PackLayoutParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::pack_layout(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::pack_layout(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::pack_layout(p, device.index, stream);
#endif
  no_backend("pack", device);
}

void pack(const PackParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::pack(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::pack(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::pack(p, device.index, stream);
#endif
  no_backend("pack", device);
}

}  // namespace rlk
