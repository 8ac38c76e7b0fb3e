// CUDA backend of covariance_mask: what would corrupt memory, how work is cut, which architecture's kernels run.
#include "rlk/ops/covariance_mask.h"

#include "kernels.h"
#include "rlk/backends.h"

namespace rlk::cuda {

std::int64_t covariance_mask_workspace_bytes(const CovarianceMaskParams& p, int) {
  return most_workspace_bytes<CovarianceBatch>(p.sequences);
}

void covariance_mask(const CovarianceMaskParams& p, int device, Stream stream) {
  check_covariance_mask(p);
  RLK_CHECK(p.workspace, "covariance_mask: a workspace is given");
  const DeviceGuard guard(device);
  const TokenPlan plan = choose_token_plan(p.sequences, multiprocessors(device));
  RLK_CUDA_IN_USE("covariance_mask", device, covariance_mask)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
