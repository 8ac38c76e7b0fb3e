// CUDA backend of optimal_token_baseline: what would corrupt memory, which architecture's kernels run.
#include "rlk/ops/optimal_token_baseline.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

std::int64_t optimal_token_baseline_workspace_bytes(const OptimalTokenBaselineParams& p, int) {
  return BaselineWorkspace(p.sequences, nullptr).bytes;
}

void optimal_token_baseline(const OptimalTokenBaselineParams& p, int device, Stream stream) {
  check_optimal_token_baseline(p);
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.workspace, "optimal_token_baseline: a workspace is given");
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("optimal_token_baseline: built for compute capability 8.0 and later");
  capability == 90 ? optimal_token_baseline_sm90(p, to_stream(stream))
                   : optimal_token_baseline_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
