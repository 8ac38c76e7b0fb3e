// kv_cache_append on CUDA, compiled once per architecture.
#include "copy.cuh"

namespace rlk::cuda::RLK_CUDA_ARCH {
void kv_cache_append(const CacheAppendParams& p, bool vectors, cudaStream_t stream) { run(p, vectors, stream); }
}  // namespace rlk::cuda::RLK_CUDA_ARCH
