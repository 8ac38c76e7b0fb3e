// Dispatch of logprob by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/logprob.h"

#include "cpp/cpu/logprob.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/logprob/logprob.h"
#endif
#if RLK_WITH_HIP
#include "hip/logprob/logprob.h"
#endif

namespace rlk {

void require_logprob_backend(Device device) { require_backend("logprob", device); }

std::int64_t logprob_workspace_bytes([[maybe_unused]] const LogprobParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::logprob_workspace_bytes(p, device.index);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::logprob_workspace_bytes(p);
#endif
  no_backend("logprob", device);
}

void logprob(const LogprobParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::logprob(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::logprob(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::logprob(p, device.index, stream);
#endif
  no_backend("logprob", device);
}

void logprob_merge(const LogprobMergeParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::logprob_merge(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::logprob_merge(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::logprob_merge(p, device.index, stream);
#endif
  no_backend("logprob", device);
}

void logprob_backward(const LogprobBackwardParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::logprob_backward(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::logprob_backward(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::logprob_backward(p, device.index, stream);
#endif
  no_backend("logprob", device);
}

}  // namespace rlk
