// What the host plans of a fused head: its columns and its workspace.
#pragma once

#include <algorithm>

#include "pair_grid.h"
#include "rlk/kernels/scored_groups.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

inline HeadColumns head_columns(const LogprobInput& p) {
  const PartRange parts = parts_of_columns(p.vocab_size, p.valid_vocab, p.vocab_start, p.num_columns);
  RLK_CHECK(parts.count > 0, "linear_logprob: the columns are a whole, aligned group of parts of the vocabulary");
  HeadColumns columns{};
  columns.num_parts = parts.count;
  for (int i = 0; i < columns.num_parts; ++i) {
    const std::int64_t first = part_cut(p.vocab_size, parts.first + i);
    const std::int64_t last = std::min(part_cut(p.vocab_size, parts.first + i + 1), p.valid_vocab);
    columns.part_first[i] = static_cast<int>(std::min(first, last) - p.vocab_start);
    columns.part_last[i] = static_cast<int>(last - p.vocab_start);
    const int count = columns.part_last[i] - columns.part_first[i];
    columns.longest = std::max(columns.longest, count);
  }
  // One strip of a shard of padding alone, too.
  columns.strips_per_part = std::max(1, (columns.longest + kStripColumns - 1) / kStripColumns);
  return columns;
}

// Workspace: groups of rows, target_z, nodes of strips, nodes of tiles, each from a multiple of 16 bytes on. For any number
// of rows up to `row_blocks` blocks, since how many of them are scored is not known here.
struct HeadWorkspace {
  std::int64_t target_z, nodes, tile_nodes, bytes;
};
inline HeadWorkspace head_workspace(const HeadColumns& columns, int row_blocks, int block_rows, int blocks) {
  const std::int64_t rows = std::int64_t{row_blocks} * block_rows, all = std::int64_t{row_blocks} * strips_of(columns);
  const std::int64_t strips = all < blocks ? 0 : strips_of(columns) * rows;
  const std::int64_t tiles = std::min<std::int64_t>(all, blocks - 1) * kStripTiles * block_rows;
  const std::int64_t target_z = (sizeof(ScoredGroups) + 15) / 16 * 16, nodes = target_z + rows * 4;
  return {target_z, nodes, nodes + strips * 16, nodes + (strips + tiles) * 16};
}

// The same of pairs of tiles: groups of rows, target_z, nodes of whole runs, leaves of single pairs. node_bytes: of a node.
struct PairWorkspace {
  std::int64_t target_z, nodes, pair_nodes, bytes;
};
inline PairWorkspace pair_workspace(const HeadColumns& columns, int row_blocks, int blocks, int node_bytes) {
  const PairItems items = pair_items(columns, row_blocks, blocks);
  const std::int64_t rows = std::int64_t{row_blocks} * kPairRows;
  const auto singles = [&](const RunItems& of) { return std::min<std::int64_t>(of.all, blocks - 1) * of.pairs; };
  const bool any_whole = items.full.whole + items.ends.whole > 0;
  const std::int64_t whole = any_whole ? rows * columns.num_parts * nodes_per_part(columns) : 0;
  const std::int64_t single = (singles(items.full) + singles(items.ends)) * kPairLeaves * kPairRows;
  const std::int64_t target_z = (sizeof(ScoredGroups) + 15) / 16 * 16, nodes = target_z + rows * 4;
  return {target_z, nodes, nodes + whole * node_bytes, nodes + (whole + single) * node_bytes};
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
