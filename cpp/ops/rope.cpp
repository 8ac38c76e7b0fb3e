// Dispatch of rope by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/rope.h"

#include "cpp/cpu/rope.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/rope/rope.h"
#endif
#if RLK_WITH_HIP
#include "hip/rope/rope.h"
#endif

namespace rlk {

void require_rope_backend(Device device) { require_backend("rope", device); }

void rope(const RopeParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::rope(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::rope(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::rope(p, device.index, stream);
#endif
  no_backend("rope", device);
}

}  // namespace rlk
