// How the leaves of a row are cut into groups of 32, one warp each.
#pragma once

#include <cstdint>

#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kGroupLeaves = 32;
constexpr int kGroupColumns = kGroupLeaves * kLeafColumns;
constexpr int kNodeBytes = 16;  // m, S, E, Q

// Leaves of a part are padded to a power of two, so that index order is tree order across parts too. A group is 32
// neighbours in that order: a stretch of one part where parts are long, several whole parts where they are short.
struct GroupGrid {
  int num_parts;  // of this shard: 1, 2, 4 or 8
  int first_part;
  int leaves;                                       // per part, padded
  int groups_per_part;                              // that hold columns; 0 where a group spans parts
  int parts_per_group;                              // 0 where a part spans groups
  int groups;                                       // of a row, each a task
  int nodes;                                        // of a row: groups and the padding between them, a power of two
  int part_first[kNumParts], part_last[kNumParts];  // columns of each part that are valid, [first, last), global
};

// Rows of one launch of the streaming kernel, whose workspace holds a node for each of their groups.
inline std::int64_t stream_rows(const GroupGrid& grid) {
  constexpr std::int64_t kMostNodes = std::int64_t{1} << 19;
  return kMostNodes / grid.nodes;
}
// Its workspace: counters, 16 bytes and the target's z per row, nodes.
struct StreamWorkspace {
  std::int64_t rows, target_z, nodes, bytes;
};
inline StreamWorkspace stream_workspace(const GroupGrid& grid, std::int64_t num_rows) {
  constexpr std::int64_t kCounterBytes = 8192, kRowBytes = 16;
  const std::int64_t rows = num_rows < stream_rows(grid) ? num_rows : stream_rows(grid);
  const std::int64_t target_z = kCounterBytes + rows * kRowBytes, nodes = target_z + (rows + 3) / 4 * 16;
  return {kCounterBytes, target_z, nodes, nodes + rows * grid.nodes * kNodeBytes};
}
// On sm_90, calls with so few rows per multiprocessor take a cluster per row instead, which needs no workspace.
inline bool has_few_rows_sm90(const LogprobInput& p, int multiprocessors) {
  constexpr int kFewRows = 4;
  return p.num_rows <= std::int64_t{kFewRows} * multiprocessors;
}

// Throws InvalidArgument where the columns are no whole, aligned group of parts.
GroupGrid group_grid(const LogprobInput& p);

}  // namespace rlk::cuda
