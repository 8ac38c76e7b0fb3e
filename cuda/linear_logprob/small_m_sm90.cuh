// Fused head for at most 64 rows on compute capability 9.0: hidden @ weight^T by TMA and wgmma, then logprob's leaf
// statistics of the accumulators. No logits are written to memory. One warpgroup computes all rows, in tiles of 256
// columns. Bound by HBM.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/tile_ring_sm90.cuh"
#include "head_grid.h"
#include "head_logits_sm90.cuh"
#include "rlk/load_index.h"

namespace rlk::cuda {

constexpr int kStripLevels = 3;  // levels of pairs of tiles in a strip
constexpr int kStripNodeBytes = kStripLevels * kSmallM * 16;
using SmallMTile = OneWarpgroupTile<kSmallM, kHeadTileColumns, kStripNodeBytes>;

// The destination of the node over a row's tiles. The node moves up one level whenever it is the second node of a pair,
// or the only node.
struct NodeTarget {
  float4* to;  // if `ends`: node of a thread's first row; the second row's node is 8 rows further
  int tile;    // index in the strip
  bool ends;   // the tile is the last of the strip, or of the work
};
constexpr int kNothingLeft = -2, kWholeTile = -1;  // in place of a level: no work is left; the tile's node is next

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits>
__global__ void __launch_bounds__(SmallMTile::kThreads, 1)
    linear_logprob_small_m_sm90_kernel(const __grid_constant__ HeadMaps head, const __grid_constant__ HeadMaps lora,
                                       const __grid_constant__ HeadLaunch g) {
  using Tile = SmallMTile;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight][nodes][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  auto* const kept = reinterpret_cast<float4*>(shared + (base - shared_address(shared)) + g.stages * Tile::kStageBytes);
  const std::uint32_t full = base + g.stages * Tile::kStageBytes + kStripNodeBytes, empty = full + kMaxStages * 8;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, warpgroup = warp / 4;

  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kWarpgroups * 4);
  }
  if (threadIdx.x < 32) mbarrier_init_fence();
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();
  __shared__ HeadItems items;
  if (threadIdx.x == 0) items = head_items(g.columns, g.blocks);
  __syncthreads();

  TileRing<Tile> ring{base, full, empty, g.stages, {}};
  // The number of items is computed again at each use, because a stored number would take one register too many.
  const auto exists = [&](int index) { return index < head_work_items(items); };

  if (warpgroup == Tile::kWarpgroups) {
    if (warp == Tile::kWarpgroups * 4) {
      if (elect_one()) {
        prefetch_tensor_map(&head.x);
        prefetch_tensor_map(&head.w);
      }
      for (int index = blockIdx.x; exists(index); index += gridDim.x) {
        const HeadWork work = head_work(g.columns, items, index);
        const TileRows<Tile::kBM> rows{0, g.rows};
        const int last = same_in_warp(g.columns.part_last[work.part]), tiles = same_in_warp(work.tiles);
        const int strip = (work.strip * kStripTiles + work.first_tile) * kHeadTileColumns;
        int column = same_in_warp(g.columns.part_first[work.part] + strip);
        for (int tile = 0; tile < tiles; ++tile, column += kHeadTileColumns) {
          const auto load = [&](const HeadMaps& maps, int steps) {
            load_stages<Tile::kBM, kHeadTileColumns>(&ring, maps, steps, rows, g.last_rows, column, last - column,
                                                     g.last_columns);
          };
          load(head, g.k_steps - g.lora_steps);
          load(lora, g.lora_steps);
        }
      }
    }
    return;
  }
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
  };
  const int in_block = warp * 16 + lane / 4;  // a thread's first row; its second row is 8 rows further
  const auto pack = [](const SoftmaxStats& s) { return make_float4(s.m, s.S, s.E, s.Q); };
  // Work that the previous tile left: first its node, then one level of the node's tree after another. One such step
  // runs during each of this tile's first products.
  TileShares shares;
  SoftmaxStats node[2];
  NodeTarget left{nullptr, 0, false};
  int level = kNothingLeft;
  const auto climb = [&] {
    if (level == kWholeTile) {
      tile_nodes<kMoments>(&shares, node);
      level = 0;
      return;
    }
    while (level < kStripLevels && left.ends && !(left.tile >> level & 1)) ++level;
    if (level < kStripLevels) {
      float4* const at = kept + level * Tile::kBM + in_block;
      if (left.tile >> level & 1) {
        SoftmaxStats other[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float4 v = at[8 * h];
          other[h] = {v.x, v.y, v.z, v.w};
        }
        combine_rows<kMoments>(node, other);
        ++level;
        return;
      }
      if (lane % 4 == 0) at[0] = pack(node[0]), at[8] = pack(node[1]);
      __syncwarp();
    } else if (lane % 4 == 0) {
      left.to[0] = pack(node[0]), left.to[8] = pack(node[1]);
    }
    level = kNothingLeft;
  };

  HeadWork work = head_work(g.columns, items, blockIdx.x);
  for (int index = blockIdx.x; exists(index);) {
    const int row = in_block;
    const int strip = (work.strip * kStripTiles + work.first_tile) * kHeadTileColumns;
    int column = g.columns.part_first[work.part] + strip;
    const int last = g.columns.part_last[work.part], tiles = work.tiles;
    float4* const to = work.whole
                           ? static_cast<float4*>(g.nodes) +
                                 std::int64_t{work.part * g.columns.strips_per_part + work.strip} * g.padded_rows + row
                           : static_cast<float4*>(g.tile_nodes) + std::int64_t{work.slot} * Tile::kBM + in_block;
    if (tiles == 0 && lane % 4 == 0) to[0] = to[8] = pack(identity_stats());
    float c[2], temperature[2];
    std::int64_t target[2];
    index += gridDim.x;
    if (tiles == 0 && exists(index)) work = head_work(g.columns, items, index);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, column += kHeadTileColumns) {
      float d[Tile::kBN / 2];
      bool here = false;
      // Runs during the products: the work that the previous tile left, the loads of this work's row inputs, and the
      // search for the next work.
      const auto meanwhile = [&](int k) {
        const bool last_step = k == g.k_steps - 1;
        do {
          if (level != kNothingLeft) climb();
        } while (last_step && level != kNothingLeft);
        if (k == 0) {
          if (tile == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int at = row + 8 * h;
              const bool is_row = at < g.rows;
              target[h] = is_row ? load_index(g.target, g.target_dtype, at * g.target_stride) - g.vocab_start : -1;
              temperature[h] = is_row && g.temperature != nullptr ? g.temperature[at] : g.temperature_value;
            }
          }
          if (tile == tiles - 1 && exists(index)) work = head_work(g.columns, items, index);
        }
        if (last_step) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (tile == 0) c[h] = log2_scale(temperature[h]);
            here = here || (target[h] >= column && target[h] < min(column + kHeadTileColumns, last));
          }
          here = __any_sync(kQuadLanes, here);
        }
      };
      ring.template multiply<T, false, kLogits == HeadLogits::kRounded>(d, g.k_steps, warpgroup, release, meanwhile);
      make_logits<kLogits>(g, d, column, last);
      if (here) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::int64_t at = target[h] - column - lane % 4 * 2;
          const bool is_mine = at >= 0 && at < Tile::kBN && at % 8 < 2 && target[h] < last;
          for (unsigned lanes = __ballot_sync(kQuadLanes, is_mine); lanes != 0; lanes &= lanes - 1) {
            const int holder = __ffs(lanes) - 1;
            const float2 z = pair_at<0, Tile::kBN / 8>(d, __shfl_sync(kQuadLanes, static_cast<int>(at) / 8, holder), h);
            if (lane == holder) g.target_z[row + 8 * h] = at % 2 == 0 ? z.x : z.y;
          }
        }
      }
      const auto z = [&](int leaf, int j, int h) { return columns_of(d, leaf * kLeafFragments, j, h); };
      leaf_shares<kExp, kMoments>(z, c, shares.of);
      left = {to, tile, tile == tiles - 1};
      level = kWholeTile;
    }
  }
  while (level != kNothingLeft) climb();
}

}  // namespace rlk::cuda
