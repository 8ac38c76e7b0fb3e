// Matrix product for compute capability 9.0. One or two warps copy tiles by TMA, and other warps multiply them with
// wgmma. Blocks are persistent, and the blocks of a cluster share their loads. The tensor cores limit products with a
// large m, and HBM limits products with a small m. README.md has measurements.
#pragma once

#include <algorithm>

#include "../common/async_copy_sm80.cuh"
#include "../common/cluster_sm90.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/tile_ring_sm90.cuh"
#include "copied_operands_sm90.cuh"
#include "gemm_combine.cuh"
#include "gemm_rows_sm90.cuh"
#include "gemm_store_sm90.cuh"

namespace rlk::cuda {

// A block's tile: rows of A and of B, whether each operand's contiguous index is the extent, and how the sums of chunks
// are combined. The extent is the index that is not contracted. Chunks are segments or token blocks. The output d is
// the product of A and B, or its transpose. In a transposed product A has the weights, so tiles can have few rows of d.
// kRowUnit: 0 if TMA reads A. Otherwise TMA cannot read A, because its rows begin only at multiples of kRowUnit bytes
// (gemm_rows_sm90.cuh). kCopiesOperands: spare warps copy operands that TMA cannot read (copied_operands_sm90.cuh).
template <int kM, int kN, bool kAExtentContiguous, bool kBExtentContiguous, Combine kCombination,
          bool kIsTransposed = false, int kRowUnit = 0, bool kCopiesOperands = false>
struct GemmTile {
  static constexpr int kBM = kM, kBN = kN;
  static constexpr bool kAMnMajor = kAExtentContiguous, kBMnMajor = kBExtentContiguous;
  static constexpr Combine kCombine = kCombination;
  static constexpr bool kAdds = kAMnMajor && kBMnMajor;  // weight gradients: main_grad, token blocks
  // Kernels of wide tiles compute the next tile's position while products run. The short steps of narrow tiles would
  // not hide this computation.
  static constexpr bool kPlacesAhead = kBM * kBN >= 128 * 192;
  static constexpr bool kTransposed = kIsTransposed, kLoadsRows = kRowUnit > 0;
  static constexpr int kUnit = kRowUnit;
  static constexpr bool kCopies = kCopiesOperands;
  static constexpr int kBoxes = kCombine == Combine::kTree || kLoadsRows ? 1 : stage_boxes(kM, kN),
                       kStageK = kBoxK * kBoxes;
  static_assert(!kLoadsRows || (kTransposed && !kAMnMajor && kCombine == Combine::kAdd));
  static constexpr int kWarpgroups = kBM / 64;
  static constexpr bool kTakesTurns = kWarpgroups == 2 && kBN >= 192;
  // If stages are short, two loading warps, one per operand, request stages sooner than a single warp (README.md).
  static constexpr bool kTwoLoaders = kBoxes > 1 && kBN <= 64 && !kTransposed;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kRegisters =
      (504 - 40) / kWarpgroups / 8 * 8;  // registers of a multiplying thread; a loading thread has 40
  static constexpr int kBytesA = kLoadsRows ? 0 : kBM * kBoxK * 2, kBytesB = kBN * kBoxK * 2,
                       kBoxBytes = kBytesA + kBytesB;
  static constexpr int kStageBytes = kBoxes * kBoxBytes;
  static constexpr int kKeptBytes = kCombine == Combine::kTree ? kBM * kBN * 4 : 0;
  static constexpr bool kBoxStores = !kTransposed && kBN % 64 == 0;
  static constexpr int kStoreBuffers =
      kBN == 256 && !kCopies ? 2 : 1;  // the largest number of buffers that leaves the number of stages unchanged
  static constexpr int kStaging =      // bytes per warpgroup; boxes begin at 1024 bytes
      kBoxStores ? std::max(kStoreBuffers * kStoreBoxBytes, (4 * kStagingBytes + 1023) / 1024 * 1024)
                 : 4 * kStagingBytes;
  using Rows = RowRing<kBM>;
  static constexpr int kFixedBytes = 1024 + kKeptBytes + kWarpgroups * kStaging + 2 * kMaxStages * 8 +
                                     (kLoadsRows ? Rows::kMemory : 0) + (kCopies ? CopyRing::kMemory : 0);
};

// Position of the i-th tile of clusters. Tiles are ordered in columns of `group_a` clusters, so the tiles of a wave
// form nearly a square.
struct TilePosition {
  int a, b;
};
__device__ __forceinline__ TilePosition tile_position(const GemmLaunch& g, int tiles_a, int turn) {
  const int per_group = g.group_a * g.tiles_b, group = turn / per_group, in_group = turn - group * per_group;
  const int first = group * g.group_a, height = min(g.group_a, tiles_a - first);
  return {first + in_group % height, in_group / height};
}

// The first row of A and of B in a block's part of the cluster's tile.
template <class Tile>
__device__ __forceinline__ TilePosition block_tile(const GemmLaunch& g, int tiles_a, int turn, int rank) {
  const TilePosition at = tile_position(g, tiles_a, turn);
  return {(at.a * g.cluster + rank) * Tile::kBM, at.b * Tile::kBN};
}

template <class Tile, class Loaded>
__device__ __forceinline__ void prefetch_stages(const Loaded& portion, int first, const GemmLaunch& g) {
  if (!elect_one()) return;
#pragma unroll 1
  for (int box = 0; box < g.prefetched_steps * Tile::kBoxes; ++box) portion.prefetch(first, box * kBoxK);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_sm90_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_last_a,
                     const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_last_b,
                     const __grid_constant__ CUtensorMap map_d, const __grid_constant__ GemmLaunch g) {
  constexpr int kBM = Tile::kBM, kBN = Tile::kBN, kFragment = kBN / 2;
  extern __shared__ __align__(
      1024) unsigned char shared[];  // [stages][A, B][kept sums][staging of each warp][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint32_t kept = base + g.stages * Tile::kStageBytes, staging = kept + Tile::kKeptBytes;
  const std::uint32_t full = staging + Tile::kWarpgroups * Tile::kStaging, empty = full + kMaxStages * 8;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, warpgroup = warp / 4;
  const int rank = g.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;

  const auto portion_a = [&](int left) {
    return Portion<kBM, Tile::kAMnMajor>(&map_a, &map_last_a, g.last_a, left, 1, 0);
  };
  const auto portion_b = [&](int left, int sharing, int slice) {
    return Portion<kBN, Tile::kBMnMajor>(&map_b, &map_last_b, g.last_b, left, sharing, slice);
  };
  // The kernel has two loops, so the loop for blocks without a cluster has no instructions for shared loads.
  const auto alone_or_sharing_b = [&](const auto& load) {
    if (g.cluster > 1) {
      load(g.cluster, rank);
    } else {
      load(1, 0);
    }
  };
  if (warp == Tile::kWarpgroups * 4) {
    if (elect_one()) {
      prefetch_tensor_map(&map_a);
      prefetch_tensor_map(&map_b);
    }
    if constexpr (!Tile::kAMnMajor && !Tile::kBMnMajor && !Tile::kLoadsRows) {
      // Prefetches the first weights while the previous kernel still runs. The prefetch fills only L2, because the
      // previous kernel may still write the weights.
      const TilePosition at = block_tile<Tile>(g, g.tiles_a, blockIdx.x / g.cluster, rank);
      if constexpr (Tile::kTransposed) {
        prefetch_stages<Tile>(portion_a(g.columns - at.a), at.a, g);
      } else {
        prefetch_stages<Tile>(portion_b(g.columns - at.b, 1, 0), at.b, g);
      }
    }
  }
  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, Tile::kTwoLoaders ? 2 : 1);
    mbarrier_init(empty + threadIdx.x * 8, g.cluster * Tile::kWarpgroups * 4);
    mbarrier_init_fence();
  }
  if constexpr (Tile::kLoadsRows) typename Tile::Rows(empty + kMaxStages * 8).init(threadIdx.x, Tile::kWarpgroups);
  allow_next_kernel();
  if (g.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  // If the previous kernel only copies B, the warps that load A need not wait for that kernel.
  if (!Tile::kLoadsRows || !g.follows_copy || warp <= Tile::kWarpgroups * 4) wait_for_previous_kernel();

  int tiles_a = g.tiles_a, k_steps = g.k_steps;
  if constexpr (Tile::kBMnMajor) {
    if (g.row_limit != nullptr) {
      const int limit = *g.row_limit;
      if (Tile::kAMnMajor) {
        k_steps = min(k_steps, limit / Tile::kStageK);
      } else {
        tiles_a = min(tiles_a, (limit + kBM * g.cluster - 1) / (kBM * g.cluster));
      }
    }
  }
  const int tiles = tiles_a * g.tiles_b, first_tile = blockIdx.x / g.cluster;
  const int tile_step = gridDim.x / g.cluster;
  const auto tile_of = [&](int turn) { return block_tile<Tile>(g, tiles_a, turn, rank); };
  TileRing<Tile> ring{base, full, empty, g.stages, {}};

  if (warpgroup == Tile::kWarpgroups) {
    if constexpr (Tile::kWarpgroups > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const auto for_each_tile = [&](const auto& load) {
      for (int turn = first_tile; turn < tiles; turn += tile_step) {
        const TilePosition at = tile_of(turn);
        load(at, (Tile::kTransposed ? g.columns : g.rows) - at.a, (Tile::kTransposed ? g.rows : g.columns) - at.b);
      }
    };
    if constexpr (Tile::kLoadsRows) {
      if (warp == Tile::kWarpgroups * 4) {
        for_each_tile([&](TilePosition at, int, int left_b) {
          const auto b = portion_b(left_b, 1, 0);
#pragma unroll 1
          for (int k = 0; k < k_steps; ++k) ring.template load_one<false>(b, at.b, k);
        });
      } else {
        typename Tile::Rows rows(empty + kMaxStages * 8);
        for_each_tile([&](TilePosition at, int, int) {
          rows.copy(g.rows_of_a, at.a, k_steps, warp - (Tile::kWarpgroups * 4 + 1), lane);
        });
      }
    } else if (Tile::kTwoLoaders && warp == Tile::kWarpgroups * 4) {
      for_each_tile([&](TilePosition at, int left_a, int) {
        const auto a = portion_a(left_a);
#pragma unroll 1
        for (int k = 0; k < k_steps; ++k) ring.template load_one<true>(a, at.a, k);
      });
    } else if (Tile::kTwoLoaders && warp == Tile::kWarpgroups * 4 + 1) {
      alone_or_sharing_b([&](int sharing, int slice) {
        for_each_tile([&](TilePosition at, int, int left_b) {
          const auto b = portion_b(left_b, sharing, slice);
#pragma unroll 1
          for (int k = 0; k < k_steps; ++k) ring.template load_one<false>(b, at.b, k);
        });
      });
    } else if (!Tile::kTwoLoaders && warp == Tile::kWarpgroups * 4) {
      alone_or_sharing_b([&](int sharing, int slice) {
        for_each_tile([&](TilePosition at, int left_a, int left_b) {
          const auto a = portion_a(left_a);
          const auto b = portion_b(left_b, sharing, slice);
#pragma unroll 1
          for (int k = 0; k < k_steps; ++k) {
            if constexpr (Tile::kCopies) wait_for_copies<Tile>(g.copies, at.a / kBM, at.b / kBN, k);
            ring.load(a, b, at.a, at.b, k);
          }
        });
      });
    } else if constexpr (Tile::kCopies) {
      copy_operands<Tile>(g.copies, CopyRing(empty + kMaxStages * 8, warp - (Tile::kWarpgroups * 4 + 1)), lane);
    }
  } else {
    if constexpr (Tile::kWarpgroups > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
    // Block i of the cluster loads into this block's memory, so lane i of every warp signals block i.
    const std::uint32_t tell = g.cluster > 1 && lane < g.cluster ? map_to_rank(empty, lane) : empty;
    const auto release = [&](int which) {
      if (lane >= g.cluster) return;
      if (g.cluster > 1) {
        mbarrier_arrive_remote(tell + which * 8);
      } else {
        mbarrier_arrive(tell + which * 8);
      }
    };
    const std::uint32_t warpgroup_staging = staging + warpgroup * Tile::kStaging;
    const std::uint32_t my_staging = warpgroup_staging + warp % 4 * kStagingBytes;
    TilePosition next = tile_of(first_tile);
    typename Tile::Rows rows(empty + kMaxStages * 8);
    for (int turn = first_tile; turn < tiles; turn += tile_step) {
      const TilePosition at = next;
      const auto place_next = [&] {
        if (turn + tile_step < tiles) next = tile_of(turn + tile_step);
      };
      const auto meanwhile = [&](int k) {
        if (Tile::kPlacesAhead && k == 0) place_next();
      };
      const auto multiply = [&](float(&sum)[kFragment], int steps) {
        if constexpr (Tile::kLoadsRows) {
          const RowFragments<typename Tile::Rows, Tile::kUnit> a(rows, g.rows_of_a, at.a, warp * 16, lane);
          multiply_rows<T>(&ring, a, &rows, sum, steps, lane, release);
        } else {
          ring.template multiply<T>(sum, steps, warpgroup, release, meanwhile);
        }
      };
      const auto store = [&](float(&d)[kFragment], bool first_chunk) {
        if constexpr (Tile::kTransposed) {
          store_columns<kBN>(g, d, my_staging, at.b, at.a + warp * 16, lane);
        } else {
          if constexpr (Tile::kAdds) {
            const Addend addend = addend_of(g, first_chunk);
            if (addend.data != nullptr) take_addend<kBN, true>(g, addend, d, at.a + warp * 16, at.b, lane);
          }
          if constexpr (Tile::kBoxStores) {
            if (g.box_stores) {
              return store_boxes<kBN, Tile::kStoreBuffers>(g, map_d, d, warpgroup_staging, warpgroup,
                                                           at.a + warpgroup * 64, at.b);
            }
          }
          store_rows<kBN>(g, d, my_staging, at.a + warp * 16, at.b, lane);
        }
      };
      float d[kFragment];
      if constexpr (Tile::kCombine == Combine::kContinue) {
        take_addend<kBN, false>(g, addend_of(g, true), d, at.a + warp * 16, at.b, lane);
        ring.template multiply<T, true>(d, k_steps, warpgroup, release, meanwhile);
        store(d, true);
      } else if constexpr (Tile::kCombine == Combine::kAdd) {
        for (int chunk = 0; chunk < g.chunks; ++chunk) {
          multiply(d, min(g.chunk_steps, k_steps - chunk * g.chunk_steps));
          store(d, chunk == 0);
        }
      } else if constexpr (Tile::kCombine == Combine::kFold) {
        float sum[kFragment];
        multiply(sum, g.chunk_steps);
#pragma unroll 1
        for (int chunk = 1; chunk < g.chunks; ++chunk) {
          multiply(d, min(g.chunk_steps, k_steps - chunk * g.chunk_steps));
          add_to(sum, d);
        }
        store(sum, true);
      } else {
        const KeptInShared<kFragment> whole_half{kept + threadIdx.x * 16, Tile::kWarpgroups * kWarpgroup * 16};
        combine_segments(d, g.chunks, whole_half, [&](float(&sum)[kFragment]) { multiply(sum, g.chunk_steps); });
        store(d, true);
      }
      if (!Tile::kPlacesAhead) place_next();
    }
    // No block exits while TMA still reads the block's boxes.
    if constexpr (Tile::kBoxStores) wait_for_stored_boxes<0>();
  }
  if (g.cluster > 1) {  // no block exits while other blocks may still write into its shared memory
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace rlk::cuda
