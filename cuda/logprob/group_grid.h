// How the parts of a shard are cut into groups of leaves, one warp each.
#pragma once

#include <cstdint>

#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kGroupColumns = 32 * 128;  // 32 leaves of 128 columns
constexpr int kMaxNodes = 1024;          // of a row: what one warp's tree takes
constexpr int kNodeBytes = 16;           // m, S, E, Q

// The nodes of a part are padded to a power of two, so that index order is tree order across parts too.
struct GroupGrid {
  int num_parts;   // of this shard: 1, 2, 4 or 8
  int first_part;
  int groups;      // per part
  int nodes;       // per part: groups rounded up to a power of two
};

// Throws InvalidArgument where the columns are no whole, aligned group of parts.
GroupGrid group_grid(const LogprobInput& p);

}  // namespace rlk::cuda
