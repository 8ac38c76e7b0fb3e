// optimal_token_baseline in two launches. In the first kernel, each block scans one sequence. In the second kernel,
// each thread computes one token position in all sequences of a group. All architectures share this source. HBM limits
// the second kernel if a group's workspace and returns leave L2 between their two reads. With few sequences, the
// barriers of the scans limit the speed.
#include "../common/dependent_launch.cuh"
#include "../common/kernels.h"
#include "../tokens/gpu.cuh"
#include "kernels/advantages/optimal_baseline_scan.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

__global__ void __launch_bounds__(kBaselineChunk)
    optimal_token_baseline_scan_kernel(const __grid_constant__ OptimalTokenBaselineParams p,
                                       const BaselineWorkspace w) {
  __shared__ BaselineShared shared;
  baseline_scan<TokenGpu>(p, w, blockIdx.x, &shared);
  allow_next_kernel();
}
__global__ void __launch_bounds__(kBaselineChunk)
    optimal_token_baseline_groups_kernel(const __grid_constant__ OptimalTokenBaselineParams p,
                                         const BaselineWorkspace w, std::int64_t parts) {
  wait_for_previous_kernel();
  const auto of_group = static_cast<unsigned>(parts);
  baseline_group<TokenGpu>(p, w, blockIdx.x / of_group, blockIdx.x % of_group, parts);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void optimal_token_baseline(const OptimalTokenBaselineParams& p, cudaStream_t stream) {
  const Sequences& q = p.sequences;
  const BaselineWorkspace w(q, p.workspace);
  const std::int64_t parts = baseline_blocks_of_group(q), blocks = p.num_groups * parts;
  RLK_CHECK(blocks < std::int64_t{1} << 31, "too many groups for one launch");
  if (const std::int64_t scans = q.num_sequences + rest_blocks(q); scans > 0) {
    launch_dependent<false>(optimal_token_baseline_scan_kernel, static_cast<int>(scans), kBaselineChunk, 0, stream, p,
                            w);
  }
  if (blocks > 0) {
    launch_dependent<kOverlap>(optimal_token_baseline_groups_kernel, static_cast<int>(blocks), kBaselineChunk, 0,
                               stream, p, w, parts);
  }
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
