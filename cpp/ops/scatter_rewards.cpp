// Dispatch of scatter_rewards by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/scatter_rewards.h"

#include "cpp/cpu/scatter_rewards.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/scatter_rewards/scatter_rewards.h"
#endif
#if RLK_WITH_HIP
#include "hip/scatter_rewards/scatter_rewards.h"
#endif

namespace rlk {

void require_scatter_rewards_backend(Device device) { require_backend("scatter_rewards", device); }

std::int64_t scatter_rewards_workspace_bytes([[maybe_unused]] const ScatterRewardsParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::scatter_rewards_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::scatter_rewards_workspace_bytes(p);
#endif
  no_backend("scatter_rewards", device);
}

void scatter_rewards(const ScatterRewardsParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::scatter_rewards(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::scatter_rewards(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::scatter_rewards(p, device.index, stream);
#endif
  no_backend("scatter_rewards", device);
}

}  // namespace rlk
