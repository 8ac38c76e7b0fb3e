// policy_loss: its forms of the pass over tokens. All other kernels are those of every loss over tokens.
#pragma once

#include "../common/policy_passes.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

template <PolicyForm kForm>
constexpr TokensKernel<PolicyLossParams> kPolicyTokens =
    policy_tokens_kernel<PolicyTokenTerms<kForm>, kForm == PolicyForm::kClipped ? 2 : 1>;

__global__ void __launch_bounds__(kTokenThreads)
    scale_gradients_kernel(const __grid_constant__ ScaleGradientsParams p) {
  scale_values<TokenGpu>(p, blockIdx.x, gridDim.x);
}

template <bool kOverlap>
void run_policy_loss(const PolicyLossParams& p, const PolicyPlan& plan, cudaStream_t stream) {
  TokensKernel<PolicyLossParams> tokens = kPolicyTokens<PolicyForm::kSequences>;
  switch (form_of(p)) {
    case PolicyForm::kClipped:
      tokens = kPolicyTokens<PolicyForm::kClipped>;
      break;
    case PolicyForm::kTokens:
      tokens = kPolicyTokens<PolicyForm::kTokens>;
      break;
    case PolicyForm::kSequences:
      break;
  }
  run_policy_passes<kOverlap, PolicyStatisticsTerms>(p, plan, tokens, stream);
}

inline void run_scale_gradients(const ScaleGradientsParams& p, cudaStream_t stream) {
  scale_gradients_kernel<<<static_cast<unsigned>(scale_blocks(p)), kTokenThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of scale_gradients");
}

}  // namespace
}  // namespace rlk::cuda
