// Matrix product for compute capability 9.0: one warp copies tiles by TMA, the others multiply them with wgmma; blocks
// stay and take tiles in turn, and the blocks of a cluster share what they load. Bound by the tensor cores where m is
// large, by HBM where it is small. Numbers: README.md.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/cluster_sm90.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/mbarrier_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "../common/wgmma_sm90.cuh"
#include "gemm_combine.cuh"
#include "gemm_store_sm90.cuh"

namespace rlk::cuda {

constexpr int kStageK = 64;  // 128 bytes: the widest swizzle
constexpr int kWarpgroup = 128;
constexpr int kMaxStages = 24;

// A block's tile of d: its shape, whether the operands' contiguous index is the extent, what becomes of chunks.
template <int kM, int kN, bool kAExtentContiguous, bool kBExtentContiguous, Combine kCombination>
struct GemmTile {
  static constexpr int kBM = kM, kBN = kN;
  static constexpr bool kAMnMajor = kAExtentContiguous, kBMnMajor = kBExtentContiguous;
  static constexpr Combine kCombine = kCombination;
  static constexpr int kWarpgroups = kBM / 64;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kBytesA = kBM * kStageK * 2, kBytesB = kBN * kStageK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kKeptBytes = kCombine == Combine::kTree ? kBM * kBN * 4 : 0;
  static constexpr int kFixedBytes = 1024 + kKeptBytes + kWarpgroups * 4 * kStagingBytes + 2 * kMaxStages * 8;
};

// Which tile a cluster takes at its i-th turn: columns of `group_m` clusters, so that a wave is nearly square.
struct TilePosition {
  int m, n;
};
__device__ __forceinline__ TilePosition tile_position(const GemmLaunch& g, int tile) {
  const int per_group = g.group_m * g.tiles_n, group = tile / per_group, in_group = tile - group * per_group;
  const int first = group * g.group_m, height = min(g.group_m, g.tiles_m - first);
  return {first + in_group % height, in_group / height};
}

// A block's tile of one operand, or the slice of it from row `at` of each chunk on that goes to all `ranks`.
template <int kBytesPerTile, int kChunkRows, bool kMnMajor>
__device__ __forceinline__ void load_operand(std::uint32_t shared, const CUtensorMap* map, int first, int k,
                                             std::uint32_t barrier, int at = 0, std::uint16_t ranks = 0) {
  // K-major: one chunk of kChunkRows rows by 64 k. MN-major: chunks of 64 columns by 64 k.
  constexpr int kChunks = kBytesPerTile / (kChunkRows * 128);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const std::uint32_t to = shared + chunk * kChunkRows * 128 + at * 128;
    const int x = kMnMajor ? first + chunk * 64 : k, y = kMnMajor ? k + at : first + at;
    if (ranks == 0) {
      load_box(to, map, x, y, barrier);
    } else {
      load_box_multicast(to, map, x, y, barrier, ranks);
    }
  }
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_sm90_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                     const __grid_constant__ GemmLaunch g) {
  constexpr int kBM = Tile::kBM, kBN = Tile::kBN, kFragment = kBN / 2;
  constexpr bool kAMnMajor = Tile::kAMnMajor, kBMnMajor = Tile::kBMnMajor;
  extern __shared__ __align__(
      1024) unsigned char shared[];  // [stages][A, B][kept sums][staging of each warp][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint32_t kept = base + g.stages * Tile::kStageBytes, staging = kept + Tile::kKeptBytes;
  const std::uint32_t full = staging + Tile::kWarpgroups * 4 * kStagingBytes, empty = full + kMaxStages * 8;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4;
  const int rank = g.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;

  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, g.cluster * Tile::kWarpgroups * 4);
    mbarrier_init_fence();
  }
  allow_next_kernel();
  if (g.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  wait_for_previous_kernel();

  const int tiles = g.tiles_m * g.tiles_n, first_tile = blockIdx.x / g.cluster;
  const int tile_step = gridDim.x / g.cluster;
  int stage = 0, phase = 0;
  const auto advance = [&] {
    if (++stage == g.stages) {
      stage = 0;
      phase ^= 1;
    }
  };

  if (warpgroup == Tile::kWarpgroups) {
    if constexpr (Tile::kWarpgroups == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == Tile::kWarpgroups * 4 && elect_one()) {
      prefetch_tensor_map(&map_a);
      prefetch_tensor_map(&map_b);
      // Each block of a cluster loads a slice of B's tile into all of them.
      const int slice = (kBMnMajor ? 64 : kBN) / g.cluster * rank;
      const std::uint16_t ranks = g.cluster > 1 ? (1 << g.cluster) - 1 : 0;
      for (int tile = first_tile; tile < tiles; tile += tile_step) {
        const TilePosition at = tile_position(g, tile);
        const int m = (at.m * g.cluster + rank) * kBM, n = at.n * kBN;
#pragma unroll 1
        for (int k = 0; k < g.k_steps; ++k) {
          const std::uint32_t to = base + stage * Tile::kStageBytes, barrier = full + stage * 8;
          mbarrier_wait_block(empty + stage * 8, phase ^ 1);
          mbarrier_arrive_expect(barrier, Tile::kStageBytes);
          load_operand<Tile::kBytesA, kAMnMajor ? 64 : kBM, kAMnMajor>(to, &map_a, m, k * kStageK, barrier);
          load_operand<Tile::kBytesB, kBMnMajor ? 64 : kBN, kBMnMajor>(to + Tile::kBytesA, &map_b, n, k * kStageK,
                                                                       barrier, slice, ranks);
          advance();
        }
      }
    }
  } else {
    if constexpr (Tile::kWarpgroups == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    // Lane i of every warp tells block i of the cluster, which loads into this one.
    const std::uint32_t tell = g.cluster > 1 && lane < g.cluster ? map_to_rank(empty, lane) : empty;
    const auto release = [&](int which) {
      if (lane >= g.cluster) return;
      if (g.cluster > 1) {
        mbarrier_arrive_remote(tell + which * 8);
      } else {
        mbarrier_arrive(tell + which * 8);
      }
    };
    // Sums of `steps` stages, from +0.
    const auto multiply = [&](float(&sum)[kFragment], int steps) {
      float d[kFragment];  // of its own: wgmma's accumulators must not be touched while any of them is in flight
      int previous = 0;
#pragma unroll 1
      for (int k = 0; k < steps; ++k) {
        mbarrier_wait_block(full + stage * 8, phase);
        const std::uint32_t tile_a = base + stage * Tile::kStageBytes, tile_b = tile_a + Tile::kBytesA;
        const std::uint64_t desc_a = tile_descriptor<kAMnMajor>(tile_a + warpgroup * 64 * 128, 64 * 128);
        const std::uint64_t desc_b = tile_descriptor<kBMnMajor>(tile_b, 64 * 128);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kStageK / 16; ++step) {
          wgmma<T, kBN, kAMnMajor, kBMnMajor>(d, desc_a + step * kDescriptorStep<kAMnMajor>,
                                              desc_b + step * kDescriptorStep<kBMnMajor>, k > 0 || step > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the stage before this one has been read
        if (k > 0) release(previous);
        previous = stage;
        advance();
      }
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kFragment; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");
        sum[i] = d[i];
      }
      release(previous);
    };
    const std::uint32_t my_staging = staging + warp * kStagingBytes;
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
      const TilePosition at = tile_position(g, tile);
      const int m = (at.m * g.cluster + rank) * kBM + warp * 16, n = at.n * kBN;
      const auto store = [&](float(&d)[kFragment], bool first_chunk) {
        store_rows<kBN>(g, d, my_staging, m, n, first_chunk, lane);
      };
      float d[kFragment];
      if constexpr (Tile::kCombine == Combine::kAdd) {
        for (int chunk = 0; chunk < g.chunks; ++chunk) {
          multiply(d, min(g.chunk_steps, g.k_steps - chunk * g.chunk_steps));
          store(d, chunk == 0);
        }
      } else if constexpr (Tile::kCombine == Combine::kFold) {
        float sum[kFragment];
        multiply(sum, g.chunk_steps);
#pragma unroll 1
        for (int chunk = 1; chunk < g.chunks; ++chunk) {
          multiply(d, min(g.chunk_steps, g.k_steps - chunk * g.chunk_steps));
          add_to(sum, d);
        }
        store(sum, true);
      } else {
        const KeptInShared<kFragment> whole_half{kept + threadIdx.x * 16, Tile::kWarpgroups * kWarpgroup * 16};
        combine_segments(d, g.chunks, whole_half, [&](float(&sum)[kFragment]) { multiply(sum, g.chunk_steps); });
        store(d, true);
      }
    }
  }
  if (g.cluster > 1) {  // no block leaves while another may still write into it
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace rlk::cuda
