// The backward of attention: the kernel for delta, the float32 kernels (kernels/attention/backward.h), and the launches
// of a call.
#pragma once

#include "../gpu.cuh"
#include "../sinks.cuh"
#include "kernels/attention/backward.h"
#include "mma.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_delta_kernel(const __grid_constant__ AttentionBackwardParams p, std::int64_t rows) {
  attention_delta<AttentionGpu, T>(p, rows, blockIdx.x, gridDim.x);
}

// The blocks of threads per multiprocessor that ptxas must make room for when it limits registers; 0: ptxas chooses.
// For trees ptxas would choose two blocks, and spill.
template <class Params>
constexpr int kBlocksOfGradients = kMayBranch<Params> ? 1 : 0;

template <class T, class Tile, class Params>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksOfGradients<Params>)
    attention_dq_kernel(const __grid_constant__ Params p, const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(128) unsigned char memory[];
  AttentionQueryGradient<AttentionGpu, T, Tile, Params> pass(p, g, memory);
#pragma unroll 1
  for (std::int64_t begin = AttentionPlace(p, g, blockIdx.x, Tile::kRows).first;
       begin < AttentionPlace(p, g, blockIdx.x, Tile::kRows).last;) {
    begin = pass.run(AttentionPlace(p, g, blockIdx.x, Tile::kRows), begin);
  }
}

template <class T, class Tile, class Params>
__global__ void __launch_bounds__(kAttentionThreads, kBlocksOfGradients<Params>)
    attention_dkv_kernel(const __grid_constant__ Params p, const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(128) unsigned char memory[];
  AttentionKeyGradient<AttentionGpu, T, Tile, Params> pass(p, g, memory);
#pragma unroll 1
  for (std::int64_t begin = AttentionPlace(p, g, blockIdx.x, Tile::kRows).first;
       begin < AttentionPlace(p, g, blockIdx.x, Tile::kRows).last;) {
    begin = pass.run(AttentionPlace(p, g, blockIdx.x, Tile::kRows), begin);
  }
}

// Launches the float32 kernels. Tiles of a tree have only 16 rows, because a thread keeps two sets of sums in
// registers.
template <class Params>
void run_attention_backward_tiles(const Params& p, bool vectors, cudaStream_t stream) {
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    constexpr int kBytes = AttentionBackwardShared<Tile>::kBytes;
    if (p.dq != nullptr && attention_rows(p) * p.num_q_heads > 0) {
      const AttentionGrid g = attention_query_grid(p, Tile::kRows, vectors);
      allow_shared_memory<attention_dq_kernel<Fp32, Tile, Params>>();
      const unsigned blocks = checked_blocks(attention_blocks(p, g), "attention_backward");
      attention_dq_kernel<Fp32, Tile, Params><<<blocks, kAttentionThreads, kBytes, stream>>>(p, g);
      check(cudaGetLastError(), "launch of attention's dq");
    }
    if (p.dk != nullptr && attention_keys(p) > 0) {
      const AttentionGrid g = attention_key_grid(p, Tile::kRows, vectors);
      allow_shared_memory<attention_dkv_kernel<Fp32, Tile, Params>>();
      const unsigned blocks = checked_blocks(attention_blocks(p, g), "attention_backward");
      attention_dkv_kernel<Fp32, Tile, Params><<<blocks, kAttentionThreads, kBytes, stream>>>(p, g);
      check(cudaGetLastError(), "launch of attention's dk and dv");
    }
  };
  if constexpr (kMayBranch<Params>) {
    p.head_dim <= 128 ? launch(AttentionTile<1, 128, 16>{}) : launch(AttentionTile<1, 256, 16>{});
  } else if (p.head_dim <= 64) {
    launch(AttentionTile<4, 64, 32>{});
  } else {
    p.head_dim <= 128 ? launch(AttentionTile<4, 128, 32>{}) : launch(AttentionTile<2, 256, 32>{});
  }
}

// Writes delta to p.workspace.
template <class T>
void run_attention_delta(const AttentionBackwardParams& p, cudaStream_t stream) {
  const std::int64_t rows = attention_rows(p) * p.num_q_heads;
  if (rows == 0) return;
  constexpr std::int64_t kOfBlock = kAttentionThreads / kAttentionChains;
  const std::int64_t blocks = std::min<std::int64_t>((rows + kOfBlock - 1) / kOfBlock, 1 << 20);
  attention_delta_kernel<T><<<static_cast<unsigned>(blocks), kAttentionThreads, 0, stream>>>(p, rows);
  check(cudaGetLastError(), "launch of attention's delta");
}

template <class Params>
void run_attention_backward(const Params& p, cudaStream_t stream) {
  const bool vectors = attention_at_16_bytes(p) && attention_at_16_bytes(p.dout, p.dtype);
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    run_attention_delta<T>(p, stream);
    if constexpr (T::kPacked) {
      run_attention_backward_mma<T>(p, vectors, stream);
    } else {
      run_attention_backward_tiles(p, vectors, stream);
    }
  });
  if (p.dsinks != nullptr) run_attention_sinks(p, static_cast<const float*>(p.workspace), stream);
}

}  // namespace
}  // namespace rlk::cuda
