// The host side of optimal_token_baseline on HIP checks memory safety and launches the kernels.
#include "rlk/ops/optimal_token_baseline.h"

#include "hip/common/launch.h"
#include "kernels/advantages/optimal_baseline_scan.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t optimal_token_baseline_workspace_bytes(const OptimalTokenBaselineParams& p, int) {
  return BaselineWorkspace(p.sequences, nullptr).bytes;
}

void optimal_token_baseline(const OptimalTokenBaselineParams& p, int device, Stream stream) {
  check_optimal_token_baseline(p);
  const Sequences& q = p.sequences;
  if (q.num_slots() == 0) return;
  RLK_CHECK(p.workspace, "optimal_token_baseline: a workspace is given");
  const BaselineWorkspace w(q, p.workspace);
  const std::int64_t parts = baseline_blocks_of_group(q);
  launch_blocks(device, stream, {kBaselineChunk, sizeof(BaselineShared)}, "rlk_optimal_token_baseline_scan",
                q.num_sequences + rest_blocks(q), p, w);
  launch_blocks(device, stream, {kBaselineChunk, 0}, "rlk_optimal_token_baseline_groups", p.num_groups * parts, p, w,
                parts);
}

}  // namespace rlk::hip
