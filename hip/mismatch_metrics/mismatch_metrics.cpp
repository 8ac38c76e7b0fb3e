// The host side of mismatch_metrics on HIP checks memory safety and chooses the kernels.
#include "rlk/ops/mismatch_metrics.h"

#include "hip/tokens/passes.h"
#include "kernels/losses/mismatch_terms.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t mismatch_metrics_workspace_bytes(const MismatchMetricsParams& p, int) {
  return token_workspace<MismatchBatch>(p.sequences, nullptr).bytes;
}

void mismatch_metrics(const MismatchMetricsParams& p, int device, Stream stream) {
  check_mismatch_metrics(p);
  RLK_CHECK(p.workspace, "mismatch_metrics: a workspace is given");
  run_token_passes<MismatchBatch>(p, device, stream, "rlk_mismatch_metrics", "rlk_mismatch_metrics_tokens");
  run_token_passes<MismatchMomentsBatch>(p, device, stream, "rlk_mismatch_metrics_moments",
                                         "rlk_mismatch_metrics_moments_tokens");
}

}  // namespace rlk::hip
