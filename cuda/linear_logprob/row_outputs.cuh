// The second launch of the fused head. A warp computes a row's outputs from the row's nodes. For few rows, a block
// computes a row's outputs.
#pragma once

#include "../logprob/leaf_group.cuh"
#include "head_grid.h"
#include "kernels/vocabulary/logprob_row.h"
#include "rlk/ops/linear_logprob.h"
#include "tree_nodes.cuh"

namespace rlk::cuda {

constexpr int kRootWarps = 8;       // warps per block; each computes one row
constexpr int kWarpsOfSmallM = 16;  // warps per row

struct HeadNodes {
  HeadColumns columns;
  const float4* nodes;       // [strips][padded rows]
  const float4* tile_nodes;  // [items that do not cover a whole strip][kStripTiles][padded rows]
  const float* target_z;     // [rows]
  HeadItems items;
  int padded_rows;
};

__device__ __forceinline__ SoftmaxStats stats_of(const float4& n) { return {n.x, n.y, n.z, n.w}; }

// The node of a tile in a strip's tree over kStripTiles tiles. If only the strip's node was stored, it is returned for
// the first tile, and every other tile gets the identity.
__device__ __forceinline__ SoftmaxStats tile_node(const HeadNodes& n, int row, int part, int strip, int tile) {
  const int item = part * n.columns.strips_per_part + strip;
  if (item >= n.items.whole) {
    const std::int64_t slot = std::int64_t{item - n.items.whole} * kStripTiles + tile;
    return stats_of(n.tile_nodes[slot * n.padded_rows + row]);
  }
  return tile > 0 ? identity_stats() : stats_of(n.nodes[std::int64_t{item} * n.padded_rows + row]);
}

// A warp computes the root of a row from the parts' nodes, which load(part, node) reads.
template <bool kMoments, class Load>
__device__ __forceinline__ SoftmaxStats root_by_warp(int num_parts, int nodes_per_part, const Load& load) {
  const int nodes = next_power_of_two(nodes_per_part), lane = static_cast<int>(threadIdx.x) % kWarp;
  return tree_over_nodes<kMoments>(num_parts * nodes, lane, [&](int i) {
    const int part = i / nodes, node = i % nodes;
    return node < nodes_per_part ? load(part, node) : identity_stats();
  });
}

// A block computes the root of a row; each warp adds a sixteenth of the tiles' nodes. With few rows, no work on other
// rows hides the latency: loads and trees by one warp took 12 us.
template <bool kMoments>
__device__ __forceinline__ SoftmaxStats root_by_block(const HeadNodes& n, int row) {
  __shared__ float4 of_warps[kWarpsOfSmallM];
  const int strips = next_power_of_two(n.columns.strips_per_part), nodes = n.columns.num_parts * strips * kStripTiles;
  const int of_warp = (nodes + kWarpsOfSmallM - 1) / kWarpsOfSmallM;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const SoftmaxStats mine = tree_over_nodes<kMoments>(of_warp, lane, [&](int i) {
    const int node = warp * of_warp + i, part = node / kStripTiles / strips, strip = node / kStripTiles % strips;
    if (node >= nodes || strip >= n.columns.strips_per_part) return identity_stats();
    return tile_node(n, row, part, strip, node % kStripTiles);
  });
  if (lane == 0) of_warps[warp] = make_float4(mine.m, mine.S, mine.E, mine.Q);
  __syncthreads();
  return tree_over_lanes<kMoments>(lane < kWarpsOfSmallM ? stats_of(of_warps[lane]) : identity_stats());
}

// One thread writes the outputs of a row.
__device__ __forceinline__ void write_row(const LogprobParams& p, const float* target_z, std::int64_t row, int place,
                                          std::int64_t target, const SoftmaxStats& root) {
  if (target == p.ignore_index) return write_ignored(p, row);
  const std::int64_t local = target - p.vocab_start;
  const bool here = target >= 0 && target < p.valid_vocab && local >= 0 && local < p.num_columns;
  const float z = here ? target_z[place] : canonical_nan();
  const bool fails = !is_temperature(temperature_of(p, row));
  write_outputs(p, row, fails ? failed_stats(kBadTemperature) : root, is_nan(z) ? canonical_nan() : z);
}

// Computes roots from the pairs' nodes, one row per warp.
template <bool kMoments>
__global__ void __launch_bounds__(kRootWarps* kWarp)
    linear_logprob_roots_kernel(const __grid_constant__ LogprobParams p,
                                const __grid_constant__ PairNodes<kMoments> n) {
  wait_for_previous_kernel();
  const std::int64_t row = std::int64_t{blockIdx.x} * kRootWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (row >= p.num_rows) return;
  const std::int64_t target = target_of(p, row);
  int place = static_cast<int>(row);  // index among the rows that were multiplied
  SoftmaxStats root = identity_stats();
  if (target != p.ignore_index) {
    if (n.groups != nullptr) {
      place = n.groups->place[place / kScoredGroupRows] * kScoredGroupRows + place % kScoredGroupRows;
    }
    const PairItems items = scored_pairs(n.columns, n.groups, n.row_blocks, n.blocks);
    root = root_by_warp<kMoments>(n.columns.num_parts, nodes_per_part(n.columns),
                                  [&](int part, int node) { return node_of_part(n, items, place, part, node); });
  }
  if (threadIdx.x % kWarp == 0) write_row(p, n.target_z, row, place, target, root);
}

// For a launch without groups. The loads of the target and of the nodes are in flight at the same time.
template <bool kMoments>
__global__ void __launch_bounds__(kWarpsOfSmallM* kWarp)
    linear_logprob_few_roots_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ HeadNodes n) {
  wait_for_previous_kernel();
  const int row = static_cast<int>(blockIdx.x);
  const std::int64_t target = target_of(p, row);
  const SoftmaxStats root = root_by_block<kMoments>(n, row);
  if (threadIdx.x == 0) write_row(p, n.target_z, row, row, target, root);
}

}  // namespace rlk::cuda
