// What the host plans of a fused head: its grid and its workspace.
#pragma once

#include <algorithm>

#include "../common/wave.h"
#include "head_grid.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

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
  grid.group_rows = wave_height(blocks, grid.row_blocks, block_rows, kHeadTileColumns);
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

// Whether logits are what they are before anything is done to them, but for rounding.
inline bool has_bare_logits(const LinearLogprobParams& p) {
  return p.head.bias == nullptr && p.logit_scale == 1.0f && p.softcap == 0.0f;
}
inline bool has_moments(const LinearLogprobParams& p) {
  return p.entropy != nullptr || p.sum_p_sq != nullptr || p.stats != nullptr;
}

// Rows of a block's tile. One warpgroup by itself has no registers for the moments of rounded logits.
inline int head_block_rows(const LinearLogprobParams& p, std::int64_t rows) {
  const bool rounded = has_bare_logits(p) && p.dtype == DType::kBFloat16;
  return rows <= 64 && !(rounded && has_moments(p)) ? 64 : 128;
}

}  // namespace rlk::cuda
