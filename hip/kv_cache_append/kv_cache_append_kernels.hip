// The kernels of kv_cache_append under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation. kernels/attention/cache_append.h has the code of one thread, shared with CUDA.
#include "hip/common/wave.h"
#include "kernels/attention/cache_append.h"
#include "kernels/packing/byte_copy.h"

#define RLK_CACHE_APPEND(name, Unit)                                                                          \
  RLK_KERNEL(rlk::kCacheAppendThreads)                                                                        \
  rlk_kv_cache_append_##name(rlk::CacheAppendParams p, std::int64_t first_block, rlk::CacheAppendGrid g) {    \
    rlk::cache_append_block<Unit, rlk::hip::GlobalMemory>(p, g, first_block + rlk::hip::block_id_x(),         \
                                                          static_cast<std::uint32_t>(rlk::hip::thread_id())); \
  }

RLK_CACHE_APPEND(vectors, rlk::Vector16)
RLK_CACHE_APPEND(words, std::uint32_t)
RLK_CACHE_APPEND(halves, std::uint16_t)
