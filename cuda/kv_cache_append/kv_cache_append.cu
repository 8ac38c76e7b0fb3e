// kv_cache_append: several lanes of a block move a token, by vectors of 16 bytes or by elements. Bound by HBM: k and v
// are read and written once. kernels/attention/cache_append.h has the copies of one thread, shared with HIP. All
// architectures share this source; each has its own machine code.
#include "../common/kernels.h"
#include "kernels/attention/cache_append.h"
#include "kernels/packing/byte_copy.h"  // Vector16
#include "rlk/tokens.h"                 // PlainMemory

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

template <class Unit>
__global__ void __launch_bounds__(kCacheAppendThreads)
    kv_cache_append_kernel(const __grid_constant__ CacheAppendParams p, const __grid_constant__ CacheAppendGrid g) {
  cache_append_block<Unit, PlainMemory>(p, g, blockIdx.x, threadIdx.x);
}

template <class Unit>
void launch(const CacheAppendParams& p, cudaStream_t stream) {
  const CacheAppendGrid g = cache_append_grid(p, sizeof(Unit));
  if (g.blocks == 0) return;
  kv_cache_append_kernel<Unit><<<static_cast<unsigned>(g.blocks), kCacheAppendThreads, 0, stream>>>(p, g);
  check(cudaGetLastError(), "launch of kv_cache_append");
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void kv_cache_append(const CacheAppendParams& p, bool vectors, cudaStream_t stream) {
  if (vectors) return launch<Vector16>(p, stream);
  size_of(p.dtype) == 4 ? launch<std::uint32_t>(p, stream) : launch<std::uint16_t>(p, stream);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
