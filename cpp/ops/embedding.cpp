// Dispatch of embedding by the device of its arguments. A backend that this build lacks is an error, never another path.
#include "rlk/ops/embedding.h"

#include "cpp/cpu/embedding.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/embedding/embedding.h"
#endif
#if RLK_WITH_HIP
#include "hip/embedding/embedding.h"
#endif

namespace rlk {

void require_embedding_backend(Device device) { require_backend("embedding", device); }

void embedding(const EmbeddingParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::embedding(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::embedding(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::embedding(p, device.index, stream);
#endif
  no_backend("embedding", device);
}

std::int64_t embedding_backward_workspace_bytes([[maybe_unused]] const EmbeddingBackwardParams& p, Device device) {
  if (device.type == DeviceType::kCpu) return 0;
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::embedding_backward_workspace_bytes(p);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::embedding_backward_workspace_bytes(p);
#endif
  no_backend("embedding", device);
}

void embedding_backward(const EmbeddingBackwardParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::embedding_backward(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::embedding_backward(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::embedding_backward(p, device.index, stream);
#endif
  no_backend("embedding", device);
}

}  // namespace rlk
