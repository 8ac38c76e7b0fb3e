// Dispatch of optimal_token_baseline by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/optimal_token_baseline.h"

#include "cpp/cpu/optimal_token_baseline.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/optimal_token_baseline/optimal_token_baseline.h"
#endif
#if RLK_WITH_HIP
#include "hip/optimal_token_baseline/optimal_token_baseline.h"
#endif

namespace rlk {

void require_optimal_token_baseline_backend(Device device) { require_backend("optimal_token_baseline", device); }

std::int64_t optimal_token_baseline_workspace_bytes([[maybe_unused]] const OptimalTokenBaselineParams& p,
                                                    Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::optimal_token_baseline_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::optimal_token_baseline_workspace_bytes(p);
#endif
  no_backend("optimal_token_baseline", device);
}

void optimal_token_baseline(const OptimalTokenBaselineParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::optimal_token_baseline(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::optimal_token_baseline(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::optimal_token_baseline(p, device.index, stream);
#endif
  no_backend("optimal_token_baseline", device);
}

}  // namespace rlk
