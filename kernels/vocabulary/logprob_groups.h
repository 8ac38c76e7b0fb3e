// Splits the leaves of a row into groups of 32. One warp or wave computes a group.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "rlk/ops/logprob.h"

namespace rlk {

constexpr int kGroupLeaves = 32;
constexpr int kGroupColumns = kGroupLeaves * kLeafColumns;
constexpr int kNodeBytes = 16;  // a node of the tree has the floats m, S, E and Q

// A leaf is 128 columns. The leaves of each part of the vocabulary are padded to a power of two, so that the indices of
// leaves follow the tree even across parts. A group is 32 leaves with neighbouring indices. If parts are long, a group
// is a range of one part. If parts are short, a group is several whole parts.
struct GroupGrid {
  int num_parts;        // parts of this shard: 1, 2, 4 or 8
  int leaves;           // leaves per part, padded
  int groups_per_part;  // groups per part that have columns; 0 if a group spans several parts
  int parts_per_group;  // parts per group; 0 if a part spans several groups
  int groups;           // groups per row
  int nodes;            // nodes per row, a power of two: the groups and the padding between them
  int part_first[kNumParts], part_last[kNumParts];  // valid columns of each part, [first, last), global
};

inline GroupGrid group_grid(PartRange parts, std::int64_t vocab_size, std::int64_t valid_vocab) {
  GroupGrid grid{};
  grid.num_parts = parts.count;
  std::int64_t longest = 0;
  for (int i = 0; i < grid.num_parts; ++i) {
    const std::int64_t first = part_cut(vocab_size, parts.first + i);
    const std::int64_t last = std::min(part_cut(vocab_size, parts.first + i + 1), valid_vocab);
    grid.part_first[i] = static_cast<int>(std::min(first, last));  // clamps a part without columns to an empty range
    grid.part_last[i] = static_cast<int>(last);
    longest = std::max(longest, last - first);
  }
  const int leaves = static_cast<int>((longest + kLeafColumns - 1) / kLeafColumns);
  if (longest > std::int64_t{kGroupLeaves} * kGroupColumns) {
    throw InvalidArgument(
        "logits: a GPU takes at most 131,072 valid columns in each of the vocabulary's eight parts, got " +
        std::to_string(longest));
  }
  grid.leaves = static_cast<int>(std::bit_ceil(static_cast<unsigned>(leaves > 0 ? leaves : 1)));
  if (grid.leaves >= kGroupLeaves) {
    grid.groups_per_part = (leaves + kGroupLeaves - 1) / kGroupLeaves;
    grid.groups = grid.num_parts * grid.groups_per_part;
    grid.nodes = grid.num_parts * (grid.leaves / kGroupLeaves);
  } else {
    const int fit = kGroupLeaves / grid.leaves;
    grid.parts_per_group = fit < grid.num_parts ? fit : grid.num_parts;
    grid.groups = grid.nodes = grid.num_parts / grid.parts_per_group;
  }
  return grid;
}
// Throws InvalidArgument unless the columns are 1, 2, 4 or 8 whole parts that form a subtree.
inline GroupGrid group_grid(const LogprobInput& p) {
  const PartRange parts = parts_of_columns(p.vocab_size, p.valid_vocab, p.vocab_start, p.num_columns);
  RLK_CHECK(parts.count > 0, "logprob: the columns are a whole, aligned group of parts of the vocabulary");
  return group_grid(parts, p.vocab_size, p.valid_vocab);
}

// A group. `part` is its first part, and `step` is its index among the groups of that part.
struct Group {
  int part, step;
};
RLK_DEVICE Group group_of_row(const GroupGrid& grid, int index) {
  if (grid.groups_per_part == 0) return {index * grid.parts_per_group, 0};
  const int part = static_cast<unsigned>(index) / static_cast<unsigned>(grid.groups_per_part);
  return {part, index - part * grid.groups_per_part};
}

// The columns of a group. A group's columns are contiguous in memory even if the group holds several parts.
struct GroupColumns {
  int first;  // global column
  int count;  // 0 or negative if the group has no valid column
};
RLK_DEVICE GroupColumns group_columns(const GroupGrid& grid, Group group) {
  const int last_part = grid.groups_per_part > 0 ? group.part : group.part + grid.parts_per_group - 1;
  const int first = grid.part_first[group.part] + group.step * kGroupColumns, left = grid.part_last[last_part] - first;
  // `count` is not clamped to 0 here. With that clamp, ptxas 13.0 would invert the comparison of the result with
  // kGroupColumns (start_group).
  return {first, left < kGroupColumns ? left : kGroupColumns};
}

// The leaf of one lane in a group.
struct LeafSpan {
  int first;    // global column
  int columns;  // 0 if the lane has no column
};
RLK_DEVICE LeafSpan leaf_span(const GroupGrid& grid, Group group, int lane) {
  int part = group.part, leaf = group.step * kGroupLeaves + lane;
  if (grid.groups_per_part == 0) {
    const int mine = static_cast<unsigned>(lane) / static_cast<unsigned>(grid.leaves);
    if (mine >= grid.parts_per_group) return {grid.part_first[part], 0};
    part += mine;
    leaf = lane - mine * grid.leaves;
  }
  const int first = grid.part_first[part] + leaf * kLeafColumns, left = grid.part_last[part] - first;
  return {first, left < 0 ? 0 : left < kLeafColumns ? left : kLeafColumns};
}

// The leaf of a group that holds a global column, or -1 if no leaf of the group holds it.
RLK_DEVICE int leaf_of_column(const GroupGrid& grid, Group group, std::int64_t column) {
  const GroupColumns columns = group_columns(grid, group);
  if (column < columns.first || column >= columns.first + columns.count) return -1;
  if (grid.groups_per_part > 0) return static_cast<int>(column - columns.first) / kLeafColumns;
  for (int leaf = 0; leaf < kGroupLeaves; ++leaf) {
    const LeafSpan span = leaf_span(grid, group, leaf);
    if (column >= span.first && column < span.first + span.columns) return leaf;
  }
  return -1;
}

// node_of_group gives the index of a group's node among the row's nodes. is_group_node tells whether a node belongs to
// a group; otherwise it is padding.
RLK_DEVICE int node_of_group(const GroupGrid& grid, Group group) {
  return grid.groups_per_part > 0 ? group.part * (grid.leaves / kGroupLeaves) + group.step
                                  : group.part / grid.parts_per_group;
}
RLK_DEVICE bool is_group_node(const GroupGrid& grid, int node) {
  return grid.groups_per_part == 0 || node % (grid.leaves / kGroupLeaves) < grid.groups_per_part;
}

}  // namespace rlk
