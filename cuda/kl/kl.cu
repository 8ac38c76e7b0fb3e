// kl: a pass over tokens without sums. All architectures share this source; each has its own machine code. Bound by
// HBM: each array is read or written once.
#include "../common/kernels.h"
#include "../tokens/gpu.cuh"
#include "kernels/losses/kl_terms.h"
#include "rlk/ops/kl.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

__global__ void __launch_bounds__(kTokenThreads, 3)
    kl_kernel(const __grid_constant__ KlParams p, std::int64_t slots, int tile) {
  token_tiles<TokenGpu, KlTokenTerms>(p, nullptr, slots, tile, blockIdx.x, nullptr,
                                      [](std::int64_t) { return KlTokenTerms::Factors{}; });
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void kl(const KlParams& p, const TokenPlan& plan, cudaStream_t stream) {
  const TokenPasses passes(p.sequences, plan.tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  RLK_CHECK(passes.slots < std::int64_t{1} << 31, "kl: too many tokens for one launch");
  kl_kernel<<<static_cast<unsigned>(passes.token_blocks), kTokenThreads, 0, stream>>>(p, passes.slots, plan.tile);
  check(cudaGetLastError(), "launch of kl");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
