// The forward kernels of attention for float32 with their launch, and the choice of kernels for the other dtypes.
// kernels/attention/forward.h has the body of the float32 kernels.
#pragma once

#include "forward_mma.cuh"
#include "gpu.cuh"
#include "kernels/attention/forward.h"
#include "splits/mma.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <class T, class Tile, class Params>
__global__ void __launch_bounds__(kAttentionThreads, T::kPacked ? 2 : 1)
    attention_kernel(const __grid_constant__ Params p, const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(128) unsigned char memory[];
  AttentionForward<AttentionGpu, T, Tile, Params> forward(p, g, memory);
#pragma unroll 1
  for (std::int64_t begin = AttentionPlace(p, g, blockIdx.x, Tile::kRows).first;
       begin < AttentionPlace(p, g, blockIdx.x, Tile::kRows).last;) {
    begin = forward.run(AttentionPlace(p, g, blockIdx.x, Tile::kRows), begin);
  }
}

template <class T, class Tile, class Params>
void launch_attention(const Params& p, bool vectors, cudaStream_t stream) {
  const AttentionGrid g = attention_query_grid(p, Tile::kRows, vectors);
  allow_shared_memory<attention_kernel<T, Tile, Params>>();
  const unsigned blocks = checked_blocks(attention_blocks(p, g), "attention");
  attention_kernel<T, Tile, Params><<<blocks, kAttentionThreads, AttentionForwardShared<Tile>::kBytes, stream>>>(p, g);
}

// kOverlap: whether this code is built for compute capability 9.0, where a kernel may begin while the previous one
// runs.
template <bool kOverlap>
void run_attention(const AttentionParams& p, const AttentionPlan& plan, cudaStream_t stream) {
  const bool vectors = attention_at_16_bytes(p);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (T::kPacked) {
      plan.kernel == AttentionKernel::kFewRows ? run_attention_splits<T, kOverlap>(p, vectors, stream)
                                               : run_attention_mma<T>(p, vectors, stream);
    } else {
      const auto launch = [&](auto tile) { launch_attention<T, decltype(tile)>(p, vectors, stream); };
      // The third argument, the number of keys per stage, is so small that two blocks of threads share a
      // multiprocessor.
      if (plan.kernel == AttentionKernel::kFewRows) {
        p.head_dim <= 128 ? launch(AttentionTile<1, 128, 16>{}) : launch(AttentionTile<1, 256, 16>{});
      } else if (p.head_dim <= 64) {
        launch(AttentionTile<4, 64, 32>{});
      } else {
        p.head_dim <= 128 ? launch(AttentionTile<4, 128, 16>{}) : launch(AttentionTile<2, 256, 16>{});
      }
    }
  });
  check(cudaGetLastError(), "launch of attention");
}

}  // namespace
}  // namespace rlk::cuda
