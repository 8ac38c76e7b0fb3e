// Matrix product for compute capability 9.0 with few rows of x. Reads of the weights limit its speed. One warp streams
// slices of `slice_rows` weight rows through shared memory by TMA. Each of the other warps multiplies 16 weight rows
// with all rows of x by mma.sync, because steps of mma.sync have a lower latency than steps of wgmma. README.md has
// measurements.
#pragma once

#include "../common/mma_sm80.cuh"
#include "gemm_sm90.cuh"

namespace rlk::cuda {

constexpr int kSmallMStageK = 128;  // two boxes of 64
constexpr int kSmallMMaxStages = 32;

struct SmallMLaunch {
  GemmLaunch gemm;  // k_steps counts stages of 128
  int slice_rows;   // weight rows of a block, a multiple of 16
  int slices;       // number of slices
};

// The slices of a block. If blocks have many slices, a block takes neighbouring slices, so different blocks read
// distant addresses: 4.5 TB/s instead of 4.4. Otherwise a block takes slices at a stride, because blocks with one slice
// less would idle too long.
struct Slices {
  int first, step, end;
};
constexpr int kSlicesInARow = 4;
__device__ __forceinline__ Slices slices_of_block(int slices) {
  const int block = blockIdx.x, blocks = gridDim.x, each = slices / blocks, more = slices % blocks;
  if (each < kSlicesInARow) return {block, blocks, slices};
  const int first = block * each + min(block, more);
  return {first, 1, first + each + (block < more)};
}

constexpr int small_m_stage_bytes(int slice_rows, int x_rows) { return (slice_rows + x_rows) * kSmallMStageK * 2; }
constexpr int small_m_fixed_bytes(int slice_rows) {
  return 1024 + slice_rows / 16 * kStagingBytes + 2 * kSmallMMaxStages * 8;
}

// Multiplies 64 contraction indices of a stage. `weights` and `x` are the lane's addresses in shared memory before the
// swizzle. `weights` is the address of row lane % 16 of the weights. `x` is the address of the row of x that the lane
// gives to ldmatrix.
template <class T, int kTiles>
__device__ __forceinline__ void multiply_box(float (&d)[4 * kTiles], std::uint32_t weights, std::uint32_t x, int lane) {
  std::uint32_t a[4][4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices_4<false>(a[step], weights + (((2 * step + lane / 16) ^ (lane % 8)) << 4));
  }
  if constexpr (kTiles == 1) {
    std::uint32_t b[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      load_matrices_4<false>(b[half], x + (((4 * half + lane / 8) ^ (lane % 8)) << 4));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(d), a[step], b[step / 2][step % 2 * 2],
                      b[step / 2][step % 2 * 2 + 1]);
    }
  } else {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        std::uint32_t b[4];
        load_matrices_4<false>(b, x + pair * 16 * 128 + (((2 * step + lane / 8 % 2) ^ (lane % 8)) << 4));
        mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(d[8 * pair]), a[step], b[0], b[1]);
        mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(d[8 * pair + 4]), a[step], b[2], b[3]);
      }
    }
  }
}

// `kTiles`: x has at most 8 kTiles rows.
template <class T, int kTiles>
__global__ void __launch_bounds__(288, 1)
    gemm_small_m_sm90_kernel(const __grid_constant__ CUtensorMap map_weight, const __grid_constant__ CUtensorMap map_x,
                             const __grid_constant__ SmallMLaunch launch) {
  constexpr int kXRows = 8 * kTiles;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][2 x weights, 2 x x][staging][barriers]
  const GemmLaunch& g = launch.gemm;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int weight_bytes = launch.slice_rows * 128, stage_bytes = small_m_stage_bytes(launch.slice_rows, kXRows);
  const int warps = launch.slice_rows / 16;
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u, staging = base + g.stages * stage_bytes;
  const std::uint32_t full = staging + warps * kStagingBytes, empty = full + kSmallMMaxStages * 8;
  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, warps);
    mbarrier_init_fence();
  }
  const Slices mine = slices_of_block(launch.slices);
  if (warp == warps && elect_one()) {  // prefetches as in gemm_sm90.cuh
    prefetch_tensor_map(&map_weight);
    prefetch_tensor_map(&map_x);
    for (int box = 0; box < g.prefetched_steps * 2; ++box) {
      prefetch_box(&map_weight, box * kBoxK, mine.first * launch.slice_rows);
    }
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  RingPosition ring;
  if (warp == warps) {
    for (int slice = mine.first; slice < mine.end; slice += mine.step) {
#pragma unroll 1
      for (int k = 0; k < g.k_steps; ++k) {
        const std::uint32_t to = base + ring.stage * stage_bytes, barrier = full + ring.stage * 8;
        mbarrier_wait_block(empty + ring.stage * 8, ring.phase ^ 1);
        if (elect_one()) {  // the whole warp runs the loop, as in tile_ring_sm90.cuh
          mbarrier_arrive_expect(barrier, stage_bytes);
#pragma unroll
          for (int box = 0; box < 2; ++box) {
            load_box(to + box * weight_bytes, &map_weight, k * kSmallMStageK + box * 64, slice * launch.slice_rows,
                     barrier);
          }
#pragma unroll
          for (int box = 0; box < 2; ++box) {
            load_box(to + 2 * weight_bytes + box * kXRows * 128, &map_x, k * kSmallMStageK + box * 64, 0, barrier);
          }
        }
        ring.advance(g.stages);
      }
    }
    return;
  }
  // Offsets of the lane's row among the 8 or 16 rows of one ldmatrix.
  const std::uint32_t weight_row = warp * 16 * 128 + lane % 16 * 128;
  const std::uint32_t x_row = (kTiles == 1 ? lane % 8 : lane / 16 * 8 + lane % 8) * 128;
  const auto multiply = [&](float(&d)[4 * kTiles]) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) d[i] = 0.0f;
#pragma unroll 1
    for (int k = 0; k < g.chunk_steps; ++k) {
      const std::uint32_t weights = base + ring.stage * stage_bytes, x = weights + 2 * weight_bytes;
      mbarrier_wait_block(full + ring.stage * 8, ring.phase);
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        multiply_box<T, kTiles>(d, weights + box * weight_bytes + weight_row, x + box * kXRows * 128 + x_row, lane);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + ring.stage * 8);
      ring.advance(g.stages);
    }
  };
  for (int slice = mine.first; slice < mine.end; slice += mine.step) {
    float d[4 * kTiles];
    combine_segments(d, g.chunks, KeptInRegisters<4 * kTiles>{}, multiply);
    store_columns<8 * kTiles>(g, d, staging + warp * kStagingBytes, 0, slice * launch.slice_rows + warp * 16, lane);
  }
}

}  // namespace rlk::cuda
