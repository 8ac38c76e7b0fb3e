// CUDA backend of mismatch_metrics: what would corrupt memory, how work is cut, which architecture's kernels run.
#include "rlk/ops/mismatch_metrics.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

std::int64_t mismatch_metrics_workspace_bytes(const MismatchMetricsParams& p, int) {
  return most_workspace_bytes<MismatchBatch>(p.sequences);
}

void mismatch_metrics(const MismatchMetricsParams& p, int device, Stream stream) {
  check_mismatch_metrics(p);
  RLK_CHECK(p.workspace, "mismatch_metrics: a workspace is given");
  const DeviceGuard guard(device);
  const TokenPlan plan = choose_token_plan(p.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("mismatch_metrics", device, mismatch_metrics)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
