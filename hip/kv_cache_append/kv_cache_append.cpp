// The host side of kv_cache_append on HIP checks memory safety and chooses the kernel of a call.
#include "rlk/ops/kv_cache_append.h"

#include <string>

#include "hip/common/launch.h"
#include "kernels/attention/cache_append.h"
#include "rlk/backends.h"

namespace rlk::hip {

void kv_cache_append(const CacheAppendParams& p, int device, Stream stream) {
  check_cache_append(p);
  if (p.num_slots == 0 || p.num_pages == 0) return;
  const bool vectors = cache_append_has_vectors(p);
  const char* unit = vectors ? "vectors" : size_of(p.dtype) == 4 ? "words" : "halves";
  const CacheAppendGrid g = cache_append_grid(p, vectors ? 16 : size_of(p.dtype));
  launch_blocks(device, stream, {kCacheAppendThreads, 0}, std::string("rlk_kv_cache_append_") + unit, g.blocks, p, g);
}

}  // namespace rlk::hip
