// kv_cache_append for SM80 and later.
#include "copy.cuh"

namespace rlk::cuda {
void kv_cache_append_sm80(const CacheAppendParams& p, bool vectors, cudaStream_t stream) { run(p, vectors, stream); }
}  // namespace rlk::cuda
