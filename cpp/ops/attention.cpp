// Dispatch of attention by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/attention.h"

#include "cpp/cpu/attention.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#include "rlk/kernels/attention_span.h"
#if RLK_WITH_CUDA
#include "cuda/attention/attention.h"
#endif
#if RLK_WITH_HIP
#include "hip/attention/attention.h"
#endif

namespace rlk {

void require_attention_backend(Device device) { require_backend("attention", device); }

std::int64_t attention_workspace_bytes([[maybe_unused]] const AttentionParams& p, Device device) {
  require_attention_backend(device);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::attention_workspace_bytes(p, device.index);
#endif
  return 0;
}

void attention(const AttentionParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::attention(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::attention(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::attention(p, device.index, stream);
#endif
  no_backend("attention", device);
}

std::int64_t attention_backward_workspace_bytes(const AttentionBackwardParams& p, Device device) {
  require_attention_backend(device);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::attention_backward_workspace_bytes(p, device.index);
#endif
  return 4 * attention_rows(p) * p.num_q_heads;  // delta
}

void attention_backward(const AttentionBackwardParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::attention_backward(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::attention_backward(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::attention_backward(p, device.index, stream);
#endif
  no_backend("attention", device);
}

}  // namespace rlk
