// How a call of linear_logprob becomes launches on compute capability 9.0. One form of the logits a translation unit.
#pragma once

#include "../common/alignment.h"
#include "../common/kernel_memory.h"
#include "../common/tensor_map.h"
#include "forward_sm90.cuh"
#include "roots.cuh"

namespace rlk::cuda {

constexpr std::int64_t kMostHeadRows = std::int64_t{1} << 30;
constexpr int kGroupRows = 2048;  // whose hidden states stay in L2 while the weights pass by

inline HeadGrid head_grid(const LogprobInput& p, int block_rows, int blocks) {
  const PartRange parts = parts_of_columns(p.vocab_size, p.valid_vocab, p.vocab_start, p.num_columns);
  RLK_CHECK(parts.count > 0, "linear_logprob: the columns are a whole, aligned group of parts of the vocabulary");
  HeadGrid grid{};
  grid.num_parts = parts.count;
  for (int i = 0; i < grid.num_parts; ++i) {
    const std::int64_t first = part_cut(p.vocab_size, parts.first + i);
    const std::int64_t last = std::min(part_cut(p.vocab_size, parts.first + i + 1), p.valid_vocab);
    grid.part_first[i] = static_cast<int>(std::min(first, last) - p.vocab_start);
    grid.part_last[i] = static_cast<int>(last - p.vocab_start);
    const int columns = grid.part_last[i] - grid.part_first[i];
    grid.strips_per_part = std::max(grid.strips_per_part, (columns + kStripColumns - 1) / kStripColumns);
  }
  grid.row_blocks = static_cast<int>((p.num_rows + block_rows - 1) / block_rows);
  grid.group_rows = kGroupRows / block_rows;
  plan_head_items(&grid, blocks);
  return grid;
}

// Workspace: target_z, nodes of strips, nodes of tiles, each from a multiple of 16 bytes on.
struct HeadWorkspace {
  std::int64_t nodes, tile_nodes, bytes;
};
inline HeadWorkspace head_workspace(const HeadGrid& grid, std::int64_t rows, int block_rows) {
  const std::int64_t padded = std::int64_t{grid.row_blocks} * block_rows;
  const std::int64_t nodes = (rows * 4 + 15) / 16 * 16;
  const std::int64_t strips = grid.whole_items > 0 ? std::int64_t{grid.num_parts} * grid.strips_per_part * padded : 0;
  const std::int64_t tiles = std::int64_t{grid.items - grid.whole_items} * kStripTiles * block_rows;
  return {nodes, nodes + strips * 16, nodes + (strips + tiles) * 16};
}

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits, int kM>
void run_head(const LinearLogprobParams& p, cudaStream_t stream) {
  using Tile = HeadTile<kM>;
  const int blocks = multiprocessors(current_device());
  HeadLaunch g{};
  g.grid = head_grid(p, kM, blocks);
  const HeadWorkspace workspace = head_workspace(g.grid, p.num_rows, kM);
  auto* const memory = static_cast<unsigned char*>(p.workspace);
  g.target_z = reinterpret_cast<float*>(memory);
  g.nodes = reinterpret_cast<float4*>(memory + workspace.nodes);
  g.tile_nodes = reinterpret_cast<float4*>(memory + workspace.tile_nodes);
  g.bias = p.head.bias;
  g.bias_dtype = p.head.bias_dtype;
  g.target = p.target;
  g.target_dtype = p.target_dtype;
  g.target_stride = p.target_rows.inner_stride;
  g.temperature = p.temperature;
  g.temperature_value = p.temperature_value;
  g.vocab_start = p.vocab_start;
  g.ignore_index = p.ignore_index;
  g.logit_scale = p.logit_scale;
  g.softcap = p.softcap;
  g.inverse_softcap = p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f;
  g.logits_dtype = p.dtype;
  g.rows = static_cast<int>(p.num_rows);
  g.padded_rows = g.grid.row_blocks * kM;
  g.k_steps = static_cast<int>((p.head.in_features + kBoxK - 1) / kBoxK);
  g.last_rows = (g.rows % kM + 7) / 8 * 8;
  for (int i = 0; i < g.grid.num_parts; ++i) {  // the widest of the parts' last tiles
    const int columns = g.grid.part_last[i] - g.grid.part_first[i];
    g.last_columns = std::max(g.last_columns, (columns % kHeadTileColumns + 7) / 8 * 8);
  }
  const auto map = [&](const void* data, std::int64_t rows, std::int64_t stride, int box_rows) {
    return tensor_map(data, p.head.dtype, rows, p.head.in_features,
                      rows > 1 ? stride : (p.head.in_features + 7) / 8 * 8, box_rows);
  };
  const CUtensorMap x = map(p.head.hidden, p.num_rows, p.head.hidden_rows.inner_stride, kM);
  const CUtensorMap last_x =
      g.last_rows == 0 ? x : map(p.head.hidden, p.num_rows, p.head.hidden_rows.inner_stride, g.last_rows);
  const CUtensorMap w = map(p.head.weight, p.num_columns, p.head.weight_stride, kHeadTileColumns);
  const CUtensorMap last_w =
      g.last_columns == 0 ? w : map(p.head.weight, p.num_columns, p.head.weight_stride, g.last_columns);
  auto* kernel = linear_logprob_sm90_kernel<T, kExp, kMoments, kLogits, kM>;
  const int shared = allow_shared_memory<linear_logprob_sm90_kernel<T, kExp, kMoments, kLogits, kM>>();
  g.stages = std::min(kMaxStages, (shared - Tile::kFixedBytes) / Tile::kStageBytes);
  launch_dependent<true>(kernel, std::min(blocks, head_work_items(g.grid)), Tile::kThreads,
                         Tile::kFixedBytes + g.stages * Tile::kStageBytes, stream, x, last_x, w, last_w, g);
  const HeadNodes nodes{g.grid, g.nodes, g.tile_nodes, g.target_z, g.padded_rows, kM};
  launch_dependent<true>(linear_logprob_roots_kernel<kMoments>, (g.rows + kRootWarps - 1) / kRootWarps,
                         kRootWarps * kWarp, 0, stream, static_cast<const LogprobParams&>(p), nodes);
}

}  // namespace rlk::cuda
