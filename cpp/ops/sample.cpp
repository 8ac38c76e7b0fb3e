// Dispatch of sample by the device of its logits. A backend that this build lacks is an error, never another path.
#include "rlk/ops/sample.h"

#include "cpp/cpu/sample.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#include "rlk/kernels/sample_check.h"
#if RLK_WITH_CUDA
#include "cuda/sample/sample.h"
#endif
#if RLK_WITH_HIP
#include "hip/sample/sample.h"
#endif

namespace rlk {

void require_sample_backend(Device device) { require_backend("sample", device); }

std::int64_t sample_workspace_bytes(const SampleParams& p, Device device) {
  return device.type == DeviceType::kCpu || p.num_rows == 0 ? 0 : sample_workspace(p).bytes;
}

void sample(const SampleParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::sample(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::sample(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::sample(p, device.index, stream);
#endif
  no_backend("sample", device);
}

}  // namespace rlk
