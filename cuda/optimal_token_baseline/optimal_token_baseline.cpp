// CUDA backend of optimal_token_baseline: checks memory safety, then calls the kernels for the GPU's architecture.
#include "rlk/ops/optimal_token_baseline.h"

#include "../common/kernels.h"
#include "kernels/advantages/optimal_baseline_scan.h"
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
  RLK_CUDA_IN_USE("optimal_token_baseline", device, optimal_token_baseline)(p, to_stream(stream));
}

}  // namespace rlk::cuda
