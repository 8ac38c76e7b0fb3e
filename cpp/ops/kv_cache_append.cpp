// Dispatch of kv_cache_append by the device of its arguments. A backend that this build lacks is an error, never another
// path.
#include "rlk/ops/kv_cache_append.h"

#include "cpp/cpu/kv_cache_append.h"
#include "cpp/ops/backend.h"
#include "rlk/build.h"
#if RLK_WITH_CUDA
#include "cuda/kv_cache_append/kv_cache_append.h"
#endif
#if RLK_WITH_HIP
#include "hip/kv_cache_append/kv_cache_append.h"
#endif

namespace rlk {

void require_kv_cache_append_backend(Device device) { require_backend("kv_cache_append", device); }

void kv_cache_append(const CacheAppendParams& p, Device device, [[maybe_unused]] Stream stream) {
  if (device.type == DeviceType::kCpu) return cpu::kv_cache_append(p);
#if RLK_WITH_CUDA
  if (device.type == DeviceType::kCuda) return cuda::kv_cache_append(p, device.index, stream);
#endif
#if RLK_WITH_HIP
  if (device.type == DeviceType::kRocm) return hip::kv_cache_append(p, device.index, stream);
#endif
  no_backend("kv_cache_append", device);
}

}  // namespace rlk
