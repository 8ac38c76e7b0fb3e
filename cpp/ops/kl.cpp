// Dispatch of kl by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/kl.h"

#include "cpp/cpu/kl.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/kl/kl.h"
#endif
#if RLK_WITH_HIP
#include "hip/kl/kl.h"
#endif

namespace rlk {

void require_kl_backend(Device device) { require_backend("kl", device); }

void kl(const KlParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::kl(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::kl(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::kl(p, device.index, stream);
#endif
  no_backend("kl", device);
}

}  // namespace rlk
