// How the leaves of a row are cut into groups of 32, one warp each.
#pragma once

#include <cstdint>

#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kGroupLeaves = 32;
constexpr int kGroupColumns = kGroupLeaves * kLeafColumns;
constexpr int kNodeBytes = 16;   // m, S, E, Q

// Leaves of a part are padded to a power of two, so that index order is tree order across parts too. A group is 32
// neighbours in that order: a stretch of one part where parts are long, several whole parts where they are short.
struct GroupGrid {
  int num_parts;         // of this shard: 1, 2, 4 or 8
  int first_part;
  int leaves;            // per part, padded
  int groups_per_part;   // that hold columns; 0 where a group spans parts
  int parts_per_group;   // 0 where a part spans groups
  int groups;            // of a row, each a task
  int nodes;             // of a row: groups and the padding between them, a power of two
  int part_first[kNumParts], part_last[kNumParts];  // columns of each part that are valid, [first, last), global
};

// Whether the sm_80 path sends nodes through global memory: for fewer rows than its streaming kernel can spread.
inline bool uses_workspace(const LogprobInput& p, const GroupGrid& grid) {
  constexpr int kNodesOfFewRows = 16384;
  return p.num_rows * grid.nodes <= kNodesOfFewRows;
}

// Throws InvalidArgument where the columns are no whole, aligned group of parts.
GroupGrid group_grid(const LogprobInput& p);

}  // namespace rlk::cuda
