// Dispatch of gae by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/gae.h"

#include "cpp/cpu/gae.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/gae/gae.h"
#endif
#if RLK_WITH_HIP
#include "hip/gae/gae.h"
#endif

namespace rlk {

void require_gae_backend(Device device) { require_backend("gae", device); }

void gae(const GaeParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::gae(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::gae(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::gae(p, device.index, stream);
#endif
  no_backend("gae", device);
}

}  // namespace rlk
