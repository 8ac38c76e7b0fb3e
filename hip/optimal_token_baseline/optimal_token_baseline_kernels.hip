// The kernels of optimal_token_baseline under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation.
#include "hip/tokens/gpu.h"
#include "kernels/advantages/optimal_baseline_scan.h"

RLK_KERNEL(rlk::kBaselineChunk)
rlk_optimal_token_baseline_scan(rlk::OptimalTokenBaselineParams p, std::int64_t first_block, rlk::BaselineWorkspace w) {
  rlk::baseline_scan<rlk::hip::TokenGpu>(p, w, first_block + rlk::hip::block_id_x(),
                                         rlk::hip::TokenGpu::shared<rlk::BaselineShared>());
}
RLK_KERNEL(rlk::kBaselineChunk)
rlk_optimal_token_baseline_groups(rlk::OptimalTokenBaselineParams p, std::int64_t first_block, rlk::BaselineWorkspace w,
                                  std::int64_t parts) {
  const std::int64_t block = first_block + rlk::hip::block_id_x();
  rlk::baseline_group<rlk::hip::TokenGpu>(p, w, block / parts, block % parts, parts);
}
