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

// Which calls have too few rows for the streaming kernel to spread: on sm_80 by the groups, which then go through a
// workspace of a node each; on sm_90 by the rows per multiprocessor.
inline bool has_few_rows_sm80(const LogprobInput& p, const GroupGrid& grid) {
  constexpr int kNodesOfFewRows = 16384;
  return p.num_rows * grid.nodes <= kNodesOfFewRows;
}
inline bool has_few_rows_sm90(const LogprobInput& p, int multiprocessors) {
  constexpr int kFewRows = 4;
  return p.num_rows <= std::int64_t{kFewRows} * multiprocessors;
}

// The streaming kernel: tasks of a row (a part, or a group of several short parts) and rows of one launch.
constexpr std::int64_t kStreamRows = 65536;
inline int stream_tasks(const GroupGrid& grid) { return grid.groups_per_part > 0 ? grid.num_parts : grid.groups; }
// Its workspace: four words for a counter and one per row, then a node per task.
inline std::int64_t stream_counters(std::int64_t rows) { return 4 + (rows + 3) / 4 * 4; }
inline std::int64_t stream_bytes(const GroupGrid& grid, std::int64_t rows) {
  return stream_counters(rows) * 4 + rows * stream_tasks(grid) * kNodeBytes;
}

// Throws InvalidArgument where the columns are no whole, aligned group of parts.
GroupGrid group_grid(const LogprobInput& p);

}  // namespace rlk::cuda
