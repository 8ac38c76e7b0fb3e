// policy_loss: its kernels for the terms of tokens. All other kernels of policy_loss are in ../tokens, and other
// operators share these kernels. Bound by HBM: the arrays of tokens are read once, or twice if the ratio belongs to a
// sequence. The gradients are written once.
#include "../tokens/passes.cuh"
#include "../tokens/plain.cuh"
#include "kernels.h"
#include "kernels/losses/policy_kernels.h"
#include "kernels/losses/policy_plain.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

template <PolicyForm kForm>
constexpr TermsKernel<PolicyBatch> kPolicyTerms =
    token_terms_kernel<PolicyBatch, kForm == PolicyForm::kClipped ? 2 : 1, PolicyTokenTerms<kForm>>;

// Vec4s per thread. If the factor is 1, a block only begins and ends, so fewer blocks take less time.
constexpr int kScaledVec4s = 4;
__global__ void __launch_bounds__(kTokenThreads)
    scale_gradients_kernel(const __grid_constant__ ScaleGradientsParams p) {
  allow_next_kernel();
  wait_for_previous_kernel();
  scale_values<TokenGpu>(p, blockIdx.x, gridDim.x);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void policy_loss_alone(const PolicyLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  TermsKernel<PolicyBatch> terms = kPolicyTerms<PolicyForm::kSequences>;
  switch (form_of(p)) {
    case PolicyForm::kClipped:
      if (is_plain(p)) return run_plain_tokens<kOverlap, PolicyBatch, PlainPolicyTerms>(p, plan, stream);
      terms = kPolicyTerms<PolicyForm::kClipped>;
      break;
    case PolicyForm::kTokens:
      terms = kPolicyTerms<PolicyForm::kTokens>;
      break;
    case PolicyForm::kSequences:
      break;
  }
  run_token_passes<kOverlap, PolicyBatch>(p, plan, {terms}, stream);
}

void scale_gradients(const ScaleGradientsParams& p, cudaStream_t stream) {
  const std::int64_t blocks = map_blocks((p.count + kScaledVec4s - 1) / kScaledVec4s);
  launch_dependent<kOverlap>(scale_gradients_kernel, static_cast<int>(blocks), kTokenThreads, 0, stream, p);
  check(cudaGetLastError(), "launch of scale_gradients");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
