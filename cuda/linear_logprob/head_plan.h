// Host-side plan of a fused head: its columns and its workspace.
#pragma once

#include <algorithm>

#include "kernels/vocabulary/scored_groups.h"
#include "pair_grid.h"
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
  // A shard that holds only padding also has one strip.
  columns.strips_per_part = std::max(1, (columns.longest + kStripColumns - 1) / kStripColumns);
  return columns;
}

// Workspace of a call with few rows: target_z, nodes of strips, nodes of tiles, each at a multiple of 16 bytes.
struct HeadWorkspace {
  std::int64_t nodes, tile_nodes, bytes;
};
inline HeadWorkspace head_workspace(const HeadColumns& columns, int blocks) {
  const HeadItems items = head_items(columns, blocks);
  const std::int64_t of_strip = kSmallM * 16, nodes = kSmallM * 4, tile_nodes = nodes + items.whole * of_strip;
  return {nodes, tile_nodes, tile_nodes + (items.all - items.whole) * kStripTiles * of_strip};
}

// Workspace of a call with more rows: groups of rows, target_z, nodes of whole runs, leaves of single pairs, each at a
// multiple of 16 bytes. The host does not know the number of scored rows, so the layout has room for up to `row_blocks`
// blocks. `node_bytes`: bytes of a node.
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

// Whether logits are the plain products, except for rounding.
inline bool has_bare_logits(const LinearLogprobParams& p) {
  return p.head.bias == nullptr && p.logit_scale == 1.0f && p.softcap == 0.0f;
}
inline bool has_moments(const LinearLogprobParams& p) {
  return p.entropy != nullptr || p.sum_p_sq != nullptr || p.stats != nullptr;
}

// Bytes of a node. Without moments, a node has only its reference m and the sum of its exponentials relative to 2^m.
inline int node_bytes(const LinearLogprobParams& p) { return has_moments(p) ? 16 : 8; }

// Whether the kernel for few rows computes a call. Calls for which this kernel lacks registers run the kernel for many
// rows.
inline bool is_small_m(const LinearLogprobParams& p, std::int64_t rows) {
  const bool plain = has_bare_logits(p) && p.dtype == DType::kFloat32;
  const bool rounded = has_bare_logits(p) && p.dtype == DType::kBFloat16;
  return rows <= kSmallM && !(has_moments(p) && (rounded || (p.exp == Exp::kPortable && !plain)));
}

// Whether a warp has room for the nodes of all parts. For vocabularies of about a million columns or more, a warp has
// no room.
inline bool fits_one_tree(const HeadColumns& columns) {
  return columns.num_parts * next_power_of_two(nodes_per_part(columns)) <= kMostNodes;
}

}  // namespace rlk::cuda
