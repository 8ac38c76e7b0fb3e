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
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("mismatch_metrics: built for compute capability 8.0 and later");
  const TokenPlan plan = choose_token_plan(p.sequences, multiprocessors(device));
  capability == 90 ? mismatch_metrics_sm90(p, plan, to_stream(stream))
                   : mismatch_metrics_sm80(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
