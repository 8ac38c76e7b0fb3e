// CUDA backend of kv_cache_append: checks memory safety and picks the kernel for a call.
#include "rlk/ops/kv_cache_append.h"

#include "../common/kernels.h"
#include "kernels/attention/cache_append.h"
#include "rlk/backends.h"
#include "rlk/plan_note.h"

namespace rlk::cuda {

void kv_cache_append(const CacheAppendParams& p, int device, Stream stream) {
  check_cache_append(p);
  if (p.num_slots == 0 || p.num_pages == 0) return;
  const DeviceGuard guard(device);
  const bool vectors = cache_append_has_vectors(p);
  note_plan([&] { return std::string(vectors ? "vectors" : "elements"); });
  RLK_CUDA_IN_USE("kv_cache_append", device, kv_cache_append)(p, vectors, to_stream(stream));
}

}  // namespace rlk::cuda
