// covariance_mask: passes over tokens for the means and the covariances, then a radix select over slots (places of
// tokens). All architectures share this source. If L2 holds the batch, launches limit the speed; otherwise HBM does.
// All inputs except the old log-probabilities are read twice. The output array holds the candidates, the tokens that
// may be selected. The kernels write this array three times, read it once for each digit, and read it two more times.
#include "../common/kernels.h"
#include "../tokens/passes.cuh"
#include "kernels/losses/covariance_select.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

__global__ void __launch_bounds__(kSelectThreads)
    covariance_clear_kernel(const __grid_constant__ CovarianceMaskParams, const CovarianceWorkspace w) {
  wait_for_previous_kernel();
  covariance_clear<TokenGpu>(w, blockIdx.x);
  allow_next_kernel();
}
__global__ void __launch_bounds__(kSelectThreads)
    covariance_priorities_kernel(const __grid_constant__ CovarianceMaskParams p, const CovarianceWorkspace w,
                                 std::int64_t count) {
  __shared__ SelectShared shared;
  wait_for_previous_kernel();
  covariance_priorities<TokenGpu>(p, w, count, blockIdx.x, gridDim.x, &shared);
  allow_next_kernel();
}
__global__ void __launch_bounds__(kSelectThreads)
    covariance_digits_kernel(const __grid_constant__ CovarianceMaskParams p, const CovarianceWorkspace w,
                             std::int64_t count, int previous, int pass) {
  __shared__ SelectShared shared;
  wait_for_previous_kernel();
  covariance_digits<TokenGpu>(p, w, count, previous, pass, blockIdx.x, gridDim.x, &shared);
  allow_next_kernel();
}
__global__ void __launch_bounds__(kSelectThreads)
    covariance_write_kernel(const __grid_constant__ CovarianceMaskParams p, const CovarianceWorkspace w,
                            std::int64_t count) {
  __shared__ SelectShared shared;
  wait_for_previous_kernel();
  covariance_write<TokenGpu>(p, w, count, blockIdx.x, gridDim.x, &shared);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void covariance_mask(const CovarianceMaskParams& p, const TokenPlan& plan, cudaStream_t stream) {
  const std::int64_t count = p.sequences.num_slots(), blocks = map_blocks(count);
  if (count == 0) return;
  TokenLaunches<kOverlap, CovarianceBatch> launches(p, plan, stream);
  launches.launch(covariance_clear_kernel, kClearBlocks, kSelectThreads);
  launches.run(token_terms_kernel<CovarianceBatch, 3, CovarianceSumTerms>);
  launches.run_terms(token_terms_kernel<CovarianceBatch, 3, CovarianceTerms>);
  launches.launch(covariance_priorities_kernel, blocks, kSelectThreads, count);
  for_each_digit(count, [&](int previous, int pass) {
    launches.launch(covariance_digits_kernel, blocks, kSelectThreads, count, previous, pass);
  });
  launches.launch(covariance_write_kernel, blocks, kSelectThreads, count);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
