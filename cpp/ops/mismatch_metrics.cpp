// Dispatch of mismatch_metrics by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/mismatch_metrics.h"

#include "cpp/cpu/mismatch_metrics.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/mismatch_metrics/mismatch_metrics.h"
#endif
#if RLK_WITH_HIP
#include "hip/mismatch_metrics/mismatch_metrics.h"
#endif

namespace rlk {

void require_mismatch_metrics_backend(Device device) { require_backend("mismatch_metrics", device); }

std::int64_t mismatch_metrics_workspace_bytes([[maybe_unused]] const MismatchMetricsParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::mismatch_metrics_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::mismatch_metrics_workspace_bytes(p);
#endif
  no_backend("mismatch_metrics", device);
}

void mismatch_metrics(const MismatchMetricsParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::mismatch_metrics(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::mismatch_metrics(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::mismatch_metrics(p, device.index, stream);
#endif
  no_backend("mismatch_metrics", device);
}

}  // namespace rlk
