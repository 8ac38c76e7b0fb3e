// Dispatch of masked_whiten by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/masked_whiten.h"

#include "cpp/cpu/masked_whiten.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/masked_whiten/masked_whiten.h"
#endif
#if RLK_WITH_HIP
#include "hip/masked_whiten/masked_whiten.h"
#endif

namespace rlk {

void require_masked_whiten_backend(Device device) { require_backend("masked_whiten", device); }

std::int64_t masked_whiten_workspace_bytes([[maybe_unused]] const MaskedWhitenParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::masked_whiten_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::masked_whiten_workspace_bytes(p);
#endif
  no_backend("masked_whiten", device);
}

void masked_whiten(const MaskedWhitenParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::masked_whiten(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::masked_whiten(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::masked_whiten(p, device.index, stream);
#endif
  no_backend("masked_whiten", device);
}

}  // namespace rlk
