// Workspace of the streaming kernel, and the test for calls that need none.
#pragma once

#include <cstdint>

#include "kernels/vocabulary/logprob_groups.h"

namespace rlk::cuda {

// Rows of one launch of the streaming kernel, whose workspace holds a node for each of their groups.
inline std::int64_t stream_rows(const GroupGrid& grid) {
  constexpr std::int64_t kMostNodes = std::int64_t{1} << 19;
  return kMostNodes / grid.nodes;
}
// The workspace: counters; 16 bytes and the target's z for each row; nodes.
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

}  // namespace rlk::cuda
