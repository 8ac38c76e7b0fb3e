// Dispatch of group_advantage by the device of its arguments. A backend that this build lacks is an error, never another
// path.
#include "rlk/ops/group_advantage.h"

#include "cpp/cpu/group_advantage.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/group_advantage/group_advantage.h"
#endif
#if RLK_WITH_HIP
#include "hip/group_advantage/group_advantage.h"
#endif

namespace rlk {

void require_group_advantage_backend(Device device) { require_backend("group_advantage", device); }

std::int64_t group_advantage_workspace_bytes([[maybe_unused]] const GroupAdvantageParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::group_advantage_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::group_advantage_workspace_bytes(p);
#endif
  no_backend("group_advantage", device);
}

void group_advantage(const GroupAdvantageParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::group_advantage(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::group_advantage(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::group_advantage(p, device.index, stream);
#endif
  no_backend("group_advantage", device);
}

}  // namespace rlk
