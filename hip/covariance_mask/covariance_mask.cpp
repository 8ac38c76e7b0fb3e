// The host side of covariance_mask on HIP checks memory safety and chooses the kernels.
#include "rlk/ops/covariance_mask.h"

#include "hip/tokens/passes.h"
#include "kernels/losses/covariance_select.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t covariance_mask_workspace_bytes(const CovarianceMaskParams& p, int) {
  return token_workspace<CovarianceBatch>(p.sequences, nullptr).bytes;
}

void covariance_mask(const CovarianceMaskParams& p, int device, Stream stream) {
  check_covariance_mask(p);
  RLK_CHECK(p.workspace, "covariance_mask: a workspace is given");
  const std::int64_t count = p.sequences.num_slots(), blocks = map_blocks(count);
  if (count == 0) return;
  const CovarianceWorkspace w = token_workspace<CovarianceBatch>(p.sequences, p.workspace);
  const Block select = {kSelectThreads, sizeof(SelectShared)};
  launch_blocks(device, stream, {kSelectThreads, 0}, "rlk_covariance_mask_clear", kClearBlocks, p, w);
  run_token_passes<CovarianceBatch>(p, device, stream, "rlk_covariance_mask", "rlk_covariance_mask_means");
  run_token_terms<CovarianceBatch>(p, device, stream, "rlk_covariance_mask_tokens");
  launch_blocks(device, stream, select, "rlk_covariance_mask_priorities", blocks, p, w, count, blocks);
  for_each_digit(count, [&](int previous, int pass) {
    launch_blocks(device, stream, select, "rlk_covariance_mask_digits", blocks, p, w, count, previous, pass, blocks);
  });
  launch_blocks(device, stream, select, "rlk_covariance_mask_write", blocks, p, w, count, blocks);
}

}  // namespace rlk::hip
