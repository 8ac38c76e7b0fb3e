// Dispatch of importance_weights by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/importance_weights.h"

#include "cpp/cpu/importance_weights.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/importance_weights/importance_weights.h"
#endif
#if RLK_WITH_HIP
#include "hip/importance_weights/importance_weights.h"
#endif

namespace rlk {

void require_importance_weights_backend(Device device) { require_backend("importance_weights", device); }

std::int64_t importance_weights_workspace_bytes([[maybe_unused]] const ImportanceWeightsParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::importance_weights_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::importance_weights_workspace_bytes(p);
#endif
  no_backend("importance_weights", device);
}

void importance_weights(const ImportanceWeightsParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::importance_weights(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::importance_weights(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::importance_weights(p, device.index, stream);
#endif
  no_backend("importance_weights", device);
}

}  // namespace rlk
