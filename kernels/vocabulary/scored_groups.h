// Groups of rows with at least one scored row, for kernels that skip all other groups. A group is one step of rule 1's
// and rule 9's contractions. A step without a scored row would add zeros to every accumulator, so skipping it changes
// no bit.
#pragma once

#include <cstdint>

namespace rlk {

constexpr int kScoredGroupRows = 16, kMostScoredGroups = 512;  // groups in a block of 8192 rows
constexpr int kScoredTileRows = 128;

// The scored groups of a block of rows, in device memory. All rows of a scored group are there, scored or not.
struct ScoredGroups {
  std::int32_t count;                     // groups with a scored row
  std::int32_t limit;                     // rows of the scored groups, rounded up to whole tiles, at least one tile: a
                                          // product needs no further rows
  std::int32_t group[kMostScoredGroups];  // the scored groups, ascending; -1 from `count` on
  std::int32_t place[kMostScoredGroups];  // index of each group of the block in `group`; -1 if it has no scored row
};

}  // namespace rlk
