// Fused head for more than 64 rows on compute capability 9.0: hidden @ weight^T by TMA and wgmma, then logprob's leaf
// statistics of the accumulators. No logits are written to memory. The tensor cores and their power limit this kernel.
//
// Two warpgroups alternate over neighbouring tiles of 128 rows by 192 columns in the same rows. One warpgroup processes
// the logits of its tile while the other warpgroup multiplies. A leaf is 128 columns, so a pair of tiles has three
// leaves. The first warpgroup computes the first leaf's statistics. Each thread of the first warpgroup has some of the
// second leaf's first 64 columns. It passes z (the logit that enters the softmax) of these columns to the thread of the
// second warpgroup that has the same rows and chains. A chain is the sum over every eighth column of a leaf.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/loader_wait.cuh"
#include "../common/ping_pong_sm90.cuh"
#include "head_logits_sm90.cuh"
#include "pair_grid.h"
#include "rlk/load_index.h"
#include "tree_nodes.cuh"

namespace rlk::cuda {

using PairTile = PingPongTile<kPairTileColumns>;

constexpr int kMostColumns = 1 << 30;  // columns per call (fuses_linear_logprob)
constexpr int kHandedFragments = 8;    // fragments per row: half a leaf
struct alignas(16) PairShared {
  float2 handed[PairTile::kHalves * kTileRows * kHandedFragments]
               [kWarpgroup];                      // [row of a thread, eight columns][thread]
  float2 rows[PairTile::kWarpgroups][kPairRows];  // factor c and target of each row, for each warpgroup
  PairWork work[PairTile::kWarpgroups];           // in shared memory, because the accumulators need the registers
  int pairs_before[PairTile::kWarpgroups];        // pairs in the warpgroup's earlier PairWork items
  std::uint64_t full[kMaxStages], empty[kMaxStages], turn[PairTile::kWarpgroups], handed_full, handed_empty;
};
template <bool kMoments>
struct PairSharedNodes {
  NodeOf<kMoments> leaves[kPairLeaves][kPairRows];
  NodeOf<kMoments> kept[kNodeLevels][kPairRows];  // left children without their right sibling yet, one per level
};
template <bool kMoments>
constexpr int kPairFixedBytes = 1024 + static_cast<int>(sizeof(PairShared) + sizeof(PairSharedNodes<kMoments>));

// Adds a pair's leaves, for the thread's row, to the nodes of its run of pairs, or stores the leaves unchanged if the
// pair is a separate work item.
template <bool kMoments>
__device__ __forceinline__ void store_pair(const HeadLaunch& g, const PairWork& work, int pair,
                                           PairSharedNodes<kMoments>& nodes, int row) {
  using Node = NodeOf<kMoments>;
  if (work.slot >= 0) {
    Node* const to = reinterpret_cast<Node*>(g.tile_nodes) + std::int64_t{work.slot} * kPairLeaves * kPairRows + row;
#pragma unroll
    for (int i = 0; i < kPairLeaves; ++i) to[i * kPairRows] = nodes.leaves[i][row];
    return;
  }
  const int first = work.part * nodes_per_part(g.columns) + work.run * kRunNodes;
  Node* const to =
      reinterpret_cast<Node*>(g.nodes) + std::int64_t{first} * g.padded_rows + work.row_block * kPairRows + row;
  int leaf = pair * kPairLeaves;  // index in the run
#pragma unroll 1
  for (int i = 0; i < kPairLeaves; ++i, ++leaf) {
    SoftmaxStats node = nodes.leaves[i][row].stats();
    int level = 0;
#pragma unroll 1
    for (; leaf >> level & 1 && level < kNodeLevels; ++level) node = combine(nodes.kept[level][row].stats(), node);
    if (level < kNodeLevels) {
      nodes.kept[level][row] = Node(node);
    } else {
      to[std::int64_t{leaf / kNodeLeaves} * g.padded_rows] = Node(node);
    }
  }
  if (pair + 1 < work.pairs || leaf % kNodeLeaves == 0) return;
  SoftmaxStats node = identity_stats();  // the last node of the run; its missing leaves add nothing
#pragma unroll 1
  for (int level = 0; level < kNodeLevels; ++level) {
    if (leaf >> level & 1) node = combine(nodes.kept[level][row].stats(), node);
  }
  if (first + leaf / kNodeLeaves < (work.part + 1) * nodes_per_part(g.columns)) {
    to[std::int64_t{leaf / kNodeLeaves} * g.padded_rows] = Node(node);
  }
}

// The thread's index in its warpgroup. Each call reads the index again: besides the accumulators, registers have no
// room for values derived from the index.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index % kWarpgroup;
}

// A row of the tile that a thread of a warpgroup has. A thread has two rows in each half of the tile.
__device__ __forceinline__ int row_in_tile(int thread, int half, int h) {
  return half * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
}
__device__ __forceinline__ int first_column(const HeadColumns& columns, const PairWork& work) {
  return columns.part_first[work.part] + work.run * kRunColumns + work.first_pair * kPairColumns;
}

// Converts the accumulators of a warpgroup's tile to z, and stores z of each row's target.
template <HeadLogits kLogits>
__device__ __forceinline__ void make_tile_logits(const HeadLaunch& g, const PairShared& fixed, int warpgroup, int pair,
                                                 float (&d)[PairTile::kHalves][PairTile::kFragment]) {
  const PairWork& work = fixed.work[warpgroup];
  const int last = g.columns.part_last[work.part];
  const int column = first_column(g.columns, work) + pair * kPairColumns + warpgroup * kPairTileColumns;
  const int columns = min(kPairTileColumns, last - column);
#pragma unroll
  for (int half = 0; half < PairTile::kHalves; ++half) {
    make_logits<kLogits>(g, d[half], column, last);
    const int thread = thread_index(), lane = thread % 32;
    int target[kTileRows];
    bool here = false;
#pragma unroll
    for (int h = 0; h < kTileRows; ++h) {
      target[h] = __float_as_int(fixed.rows[warpgroup][row_in_tile(thread, half, h)].y) - column;
      here = here || (target[h] >= 0 && target[h] < columns);
    }
    if (!__any_sync(kQuadLanes, here)) continue;
#pragma unroll
    for (int h = 0; h < kTileRows; ++h) {
      const int at = target[h] - lane % 4 * 2;
      const bool is_mine = at >= 0 && target[h] < columns && at % 8 < 2;
      for (unsigned lanes = __ballot_sync(kQuadLanes, is_mine); lanes != 0; lanes &= lanes - 1) {
        const int holder = __ffs(lanes) - 1;
        const float2 z = pair_at<0, PairTile::kBN / 8>(d[half], __shfl_sync(kQuadLanes, at / 8, holder), h);
        if (lane == holder) {
          g.target_z[work.row_block * kPairRows + row_in_tile(thread, half, h)] = at % 2 == 0 ? z.x : z.y;
        }
      }
    }
  }
}

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits>
__global__ void __launch_bounds__(PairTile::kThreads, 1)
    linear_logprob_sm90_kernel(const __grid_constant__ HeadMaps head, const __grid_constant__ HeadMaps lora,
                               const __grid_constant__ HeadLaunch g) {
  using Tile = PairTile;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight], then PairShared, PairSharedNodes
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  auto& fixed = *reinterpret_cast<PairShared*>(shared + (base - shared_address(shared)) + g.stages * Tile::kStageBytes);
  auto& nodes = *reinterpret_cast<PairSharedNodes<kMoments>*>(&fixed + 1);
  const std::uint32_t full = shared_address(fixed.full), empty = shared_address(fixed.empty);
  const std::uint32_t turn = shared_address(fixed.turn);
  const std::uint32_t handed_full = shared_address(&fixed.handed_full),
                      handed_empty = shared_address(&fixed.handed_empty);
  const int warp = same_in_warp(threadIdx.x / 32), warpgroup = warp / 4;

  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kArrivals);
  }
  if (threadIdx.x == 0) mbarrier_init(handed_full, 4), mbarrier_init(handed_empty, 4);
  if (threadIdx.x < Tile::kWarpgroups) {
    mbarrier_init(turn + threadIdx.x * 8, 4);
    fixed.pairs_before[threadIdx.x] = fixed.work[threadIdx.x].pairs = 0;
  }
  if (threadIdx.x < 32) mbarrier_init_fence();
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();
  __shared__ PairItems items;
  if (threadIdx.x == 0) items = scored_pairs(g.columns, g.groups, g.row_blocks, g.blocks);
  __syncthreads();
  const auto exists = [&](int index) { return index < pair_work_items(items); };

  TileRing<Tile> ring{base, full, empty, g.stages, {}};
  if (warpgroup == Tile::kWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kLoaderRegisters));
    if (warp == Tile::kWarpgroups * 4) {
      if (elect_one()) {
        prefetch_tensor_map(&head.x);
        prefetch_tensor_map(&head.w);
      }
      for (int index = blockIdx.x; exists(index); index += gridDim.x) {
        const PairWork work = pair_work(g.columns, items, index);
        const TileRows<kPairRows> rows = tile_rows<kPairRows>(g, work.row_block * kPairRows);
        const int last = same_in_warp(g.columns.part_last[work.part]), tiles = same_in_warp(2 * work.pairs);
        int column = same_in_warp(first_column(g.columns, work));
        for (int tile = 0; tile < tiles; ++tile, column += kPairTileColumns) {
          const auto load = [&](const HeadMaps& maps, int steps) {
            load_stages<kPairRows, kPairTileColumns, true>(&ring, maps, steps, rows, g.last_rows, column, last - column,
                                                           g.last_columns);
          };
          load(head, g.k_steps - g.lora_steps);
          load(lora, g.lora_steps);
        }
        if (index < items.full.whole) {  // all blocks compute whole runs
          if (elect_one()) wait_for_other_loaders();
          __syncwarp();
        }
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
  const auto arrive = [&](std::uint32_t barrier) {
    if (elect_one()) mbarrier_arrive(barrier);
  };
  const auto release = [&](int stage) { arrive(empty + stage * 8); };
  const auto all_warps = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); };
  if (warpgroup == 1) skip_stages(&ring, g.k_steps);

#pragma unroll 1
  for (int index = blockIdx.x; exists(index); index += gridDim.x) {
    const PairWork& work = fixed.work[warpgroup];
    all_warps();  // all threads have read the rows of the previous work
    if (thread_index() == 0) {
      fixed.pairs_before[warpgroup] += work.pairs;
      fixed.work[warpgroup] = pair_work(g.columns, items, index);
    }
    all_warps();
    {
      const int mine = thread_index();
      int row = work.row_block * kPairRows + mine;  // the row's index among scored groups, later in the call
      if (g.groups != nullptr) {
        const int group = g.groups->group[row / kScoredGroupRows];
        row = group < 0 ? g.rows : group * kScoredGroupRows + row % kScoredGroupRows;
      }
      std::int64_t target = -1;
      float temperature = g.temperature_value;
      if (row < g.rows) {
        target = load_index(g.target, g.target_dtype, row * g.target_stride) - g.vocab_start;
        if (g.temperature != nullptr) temperature = g.temperature[row];
      }
      if (target < 0 || target >= kMostColumns) target = -1;
      fixed.rows[warpgroup][mine] = make_float2(log2_scale(temperature), __int_as_float(static_cast<int>(target)));
    }
    all_warps();
#pragma unroll 1
    for (int pair = 0; pair < work.pairs; ++pair) {
      float d[Tile::kHalves][Tile::kFragment];
      // Within a pair, the second warpgroup multiplies after the first warpgroup. The first warpgroup waits for the
      // second warpgroup's products of the previous pair.
      mbarrier_wait_block(turn + warpgroup * 8, ((fixed.pairs_before[warpgroup] + pair) & 1) ^ (warpgroup == 0));
      multiply_in_turn<T>(&ring, d, g.k_steps, release, [&] { arrive(turn + (warpgroup ^ 1) * 8); });
      skip_stages(&ring, g.k_steps);
      make_tile_logits<kLogits>(g, fixed, warpgroup, pair, d);
#pragma unroll
      for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
        for (int i = 0; i < Tile::kFragment; ++i) asm volatile("" : "+f"(d[half][i]));  // otherwise ptxas spills
      }
      const int parity = (fixed.pairs_before[warpgroup] + pair) & 1;
      const auto handed = [&](int half, int h, int j, int thread) -> float2* {
        return &fixed.handed[(half * kTileRows + h) * kHandedFragments + j][thread];
      };
      // Writes the statistics of one leaf, for the rows of one half of the tile, to the pair's nodes. The leaf's logits
      // are d[0] from fragment `first` on.
      const auto take_leaf = [&](int half, int leaf, int first) {
        const int thread = thread_index();
        float c[kTileRows];
#pragma unroll
        for (int h = 0; h < kTileRows; ++h) c[h] = fixed.rows[warpgroup][row_in_tile(thread, half, h)].x;
        SoftmaxStats shares[1][kTileRows];
        leaf_shares<kExp, kMoments>([&](int, int j, int h) { return columns_of(d[0], first, j, h); }, c, shares);
        add_shares<kMoments>(shares);
        if (thread % 4 == 0) {
#pragma unroll
          for (int h = 0; h < kTileRows; ++h) {
            nodes.leaves[leaf][row_in_tile(thread, half, h)] = NodeOf<kMoments>(shares[0][h]);
          }
        }
      };
      // The code of the statistics exists once per warpgroup, and columns are moved to the registers that this code
      // reads. When each leaf and each half of the rows had its own copy of the code, the instruction cache overflowed,
      // and the other warpgroup's products waited.
      if (warpgroup == 0) {
        mbarrier_wait_block(handed_empty, parity ^ 1);
        {
          const int thread = thread_index();
#pragma unroll
          for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
            for (int h = 0; h < kTileRows; ++h) {
#pragma unroll
              for (int j = 0; j < kHandedFragments; ++j) {
                *handed(half, h, j, thread) = columns_of(d[half], kLeafFragments, j, h);
              }
            }
          }
        }
#pragma unroll 1
        for (int half = 0; half < Tile::kHalves; ++half) {
          take_leaf(half, 0, 0);
#pragma unroll
          for (int i = 0; i < 4 * kLeafFragments; ++i) d[0][i] = d[1][i];
        }
        __syncwarp();
        arrive(handed_full);
        continue;
      }
      mbarrier_wait_block(handed_full, parity);
#pragma unroll 1
      for (int step = 0; step < 2 * Tile::kHalves; ++step) {
        const int half = step / 2, leaf = 2 - step % 2;
        take_leaf(half, leaf, kHandedFragments);
        if (leaf == 1) {
#pragma unroll
          for (int i = 0; i < Tile::kFragment; ++i) d[0][i] = d[1][i];
          continue;
        }
        const int thread = thread_index();
#pragma unroll
        for (int i = 0; i < 4 * kHandedFragments; ++i) d[0][8 * kHandedFragments + i] = d[0][i];
#pragma unroll
        for (int h = 0; h < kTileRows; ++h) {
#pragma unroll
          for (int j = 0; j < kHandedFragments; ++j) {
            const float2 z = *handed(half, h, j, thread);
            float* const to = &d[0][4 * (kHandedFragments + j) + 2 * h];
            to[0] = z.x, to[1] = z.y;
          }
        }
      }
      all_warps();
      store_pair(g, work, pair, nodes, thread_index());
      __syncwarp();
      arrive(handed_empty);
    }
  }
}

}  // namespace rlk::cuda
