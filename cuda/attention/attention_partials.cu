// The partials of attention and their merge on CUDA. CMake compiles this file once per architecture. Partials are the
// sums m, l and O of single splits of the keys. For bf16 and fp16 each block of threads computes one split for 16 rows,
// by the kernel for few queries, and stores the sums in the layout of AttentionPartialsParams. For float32 a tile has
// 16 rows.
#include "forward.cuh"
#include "kernels/attention/merge.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

template <int kColumns>
struct PartialTile : SplitTile<kColumns> {
  using Params = AttentionPartialsParams;
  static constexpr bool kPartial = true;
  static __device__ __forceinline__ std::uint32_t chunk(std::uint32_t operand, int row, int chunk) {
    return chunk_of<PartialTile>(operand, row, chunk);
  }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    attention_partial_kernel(const __grid_constant__ AttentionPartialsParams p, const __grid_constant__ SplitCall call,
                             bool vectors) {
  extern __shared__ __align__(128) unsigned char memory[];
  SplitByCopies<T, Tile>(p, call, memory, vectors).run();
}
template <class T, class Tile>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_partial_tiles_kernel(const __grid_constant__ AttentionPartialsParams p,
                                   const __grid_constant__ AttentionGrid g) {
  extern __shared__ __align__(16) unsigned char memory[];
  AttentionForward<AttentionGpu, T, Tile, AttentionPartialsParams> forward(p, g, memory);
#pragma unroll 1
  for (std::int64_t begin = AttentionPlace(p, g, blockIdx.x, Tile::kRows).first;
       begin < AttentionPlace(p, g, blockIdx.x, Tile::kRows).last;) {
    begin = forward.run(AttentionPlace(p, g, blockIdx.x, Tile::kRows), begin);
  }
}
__global__ void __launch_bounds__(kAttentionThreads)
    attention_blank_kernel(const __grid_constant__ AttentionPartialsParams p, std::int64_t threads) {
  const std::int64_t index = blockIdx.x * std::int64_t{kAttentionThreads} + threadIdx.x;
  if (index < threads) attention_partial_blank(p, index);
}
template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_fold_kernel(const __grid_constant__ AttentionMergeParams p, std::int64_t threads) {
  const std::int64_t index = blockIdx.x * std::int64_t{kAttentionThreads} + threadIdx.x;
  if (index < threads) AttentionMergeRow<AttentionGpu, T>(p, index).run();
}

unsigned blocks_of(std::int64_t threads) {
  return checked_blocks((threads + kAttentionThreads - 1) / kAttentionThreads, "attention");
}

template <class T>
void run_partials(const AttentionPartialsParams& p, bool vectors, cudaStream_t stream) {
  if constexpr (T::kPacked) {
    const SplitGrid grid(p, p.num_splits);
    if (grid.blocks == 0) return;
    const SplitCall call = {static_cast<std::uint32_t>(grid.tiles),
                            static_cast<std::uint32_t>(p.num_splits),
                            static_cast<std::uint32_t>(p.num_splits),
                            static_cast<std::uint32_t>(p.num_kv_heads),
                            static_cast<std::uint32_t>(p.num_q_heads / p.num_kv_heads),
                            true,
                            p.stats,
                            p.sums};
    const auto launch = [&](auto tile) {
      using Tile = decltype(tile);
      allow_shared_memory<attention_partial_kernel<T, Tile>>();
      attention_partial_kernel<T, Tile>
          <<<checked_blocks(grid.blocks, "attention"), Tile::kThreads, Tile::kBytes, stream>>>(p, call, vectors);
    };
    if (p.head_dim <= 64) {
      launch(PartialTile<64>{});
    } else {
      p.head_dim <= 128 ? launch(PartialTile<128>{}) : launch(PartialTile<256>{});
    }
  } else {
    const auto launch = [&](auto tile) {
      using Tile = decltype(tile);
      const AttentionGrid g = attention_query_grid(p, Tile::kRows, vectors);
      const std::int64_t blocks = attention_blocks(p, g);
      if (blocks == 0) return;
      allow_shared_memory<attention_partial_tiles_kernel<T, Tile>>();
      attention_partial_tiles_kernel<T, Tile>
          <<<checked_blocks(blocks, "attention"), kAttentionThreads, AttentionForwardShared<Tile>::kBytes, stream>>>(p,
                                                                                                                     g);
    };
    p.head_dim <= 128 ? launch(AttentionTile<1, 128, 16>{}) : launch(AttentionTile<1, 256, 16>{});
  }
}

}  // namespace

namespace RLK_CUDA_ARCH {

void attention_partials(const AttentionPartialsParams& p, cudaStream_t stream) {
  const bool vectors = attention_at_16_bytes(p);
  const std::int64_t blank = attention_blank_threads(p);
  attention_blank_kernel<<<blocks_of(blank), kAttentionThreads, 0, stream>>>(p, blank);
  check(cudaGetLastError(), "launch of attention's blanks");
  with_element_type(p.dtype, [&](auto t) { run_partials<decltype(t)>(p, vectors, stream); });
  check(cudaGetLastError(), "launch of attention's partials");
}

void attention_merge(const AttentionMergeParams& p, cudaStream_t stream) {
  const std::int64_t threads = attention_merge_threads(p);
  with_element_type(p.dtype, [&](auto t) {
    attention_fold_kernel<decltype(t)><<<blocks_of(threads), kAttentionThreads, 0, stream>>>(p, threads);
  });
  check(cudaGetLastError(), "launch of attention_merge");
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
