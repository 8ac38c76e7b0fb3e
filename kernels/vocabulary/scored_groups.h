// Groups of rows, for kernels that skip groups. A scored row is a row whose target is not ignore_index. A group is as
// many rows as the products of rules 1 and 9 (docs/numerics.md) add in one step. A step without a scored row would add
// zeros to every accumulator, so skipping the step changes no bit.
#pragma once

#include <cstdint>

namespace rlk {

constexpr int kScoredGroupRows = 16, kMostScoredGroups = 512;  // groups in a block of 8192 rows
constexpr int kScoredTileRows = 128;

// The scored groups of a block of rows, in device memory. A scored group includes its rows that are not scored.
struct ScoredGroups {
  std::int32_t count;                     // groups with a scored row
  std::int32_t limit;                     // number of rows that a product needs: the rows of the scored groups, rounded
                                          // up to whole tiles, at least one tile
  std::int32_t group[kMostScoredGroups];  // the scored groups, ascending; -1 from `count` on
  std::int32_t place[kMostScoredGroups];  // index in `group` of each group of the block; -1 if the group has no scored
                                          // row
};

}  // namespace rlk
