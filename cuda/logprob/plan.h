// The plans of logprob's forward, and the workspace of each plan. Both plans give the same bits.
#pragma once

#include <cstdint>

#include "kernels/vocabulary/logprob_groups.h"

namespace rlk::cuda {

enum class LogprobPlan : std::int32_t {
  kStream,    // any number of rows: persistent warps take groups of leaves in the order of memory
  kClusters,  // sm_90, few rows: each cluster computes one row, without a workspace
};
constexpr const char* name_of(LogprobPlan plan) { return plan == LogprobPlan::kClusters ? "clusters" : "stream"; }
// Returns the plan for a call on a GPU of compute capability `capability` (10 * major + minor) with this number of
// multiprocessors.
inline LogprobPlan choose_plan(const LogprobInput& p, int capability, int multiprocessors) {
  constexpr int kMostRows = 4;  // per multiprocessor
  const bool few = p.num_rows <= std::int64_t{kMostRows} * multiprocessors;
  return capability == 90 && few ? LogprobPlan::kClusters : LogprobPlan::kStream;
}

// The most rows of one launch of the streaming kernel. The workspace holds a node (partial statistics) for each group
// of columns of these rows.
inline std::int64_t stream_rows(const GroupGrid& grid) {
  constexpr std::int64_t kMostNodes = std::int64_t{1} << 19;
  return kMostNodes / grid.nodes;
}
// kStream's workspace, in this order: counters, a StreamRow of 16 bytes for each row, the target's z for each row,
// nodes.
struct StreamWorkspace {
  std::int64_t rows, target_z, nodes, bytes;
};
inline StreamWorkspace stream_workspace(const GroupGrid& grid, std::int64_t num_rows) {
  constexpr std::int64_t kCounterBytes = 8192, kRowBytes = 16;
  const std::int64_t rows = num_rows < stream_rows(grid) ? num_rows : stream_rows(grid);
  const std::int64_t target_z = kCounterBytes + rows * kRowBytes, nodes = target_z + (rows + 3) / 4 * 16;
  return {kCounterBytes, target_z, nodes, nodes + rows * grid.nodes * kNodeBytes};
}
inline std::int64_t workspace_bytes_of(const LogprobInput& p, LogprobPlan plan) {
  if (p.num_rows == 0 || plan == LogprobPlan::kClusters) return 0;
  return stream_workspace(group_grid(p), p.num_rows).bytes;
}

}  // namespace rlk::cuda
