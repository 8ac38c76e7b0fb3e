// Groups of rows that have a scored row, for kernels that leave the others out. A group is a step of rule 1's and rule 9's
// contractions: one without a scored row would add zeros to every accumulator, so dropping it changes no bit.
#pragma once

#include <cstdint>

namespace rlk {

constexpr int kScoredGroupRows = 16, kMostScoredGroups = 512;  // groups in a block of 8192 rows
constexpr int kScoredTileRows = 128;

// The scored groups of a block of rows, in the device's memory. A group's rows stand there whether scored or not.
struct ScoredGroups {
  std::int32_t count;                     // groups with a scored row
  std::int32_t limit;                     // rows of these in whole tiles, at least one: a product needs no more of them
  std::int32_t group[kMostScoredGroups];  // which they are, ascending; -1 from `count` on
  std::int32_t place[kMostScoredGroups];  // place of each group of the block among them; -1 where it has no scored row
};

}  // namespace rlk
