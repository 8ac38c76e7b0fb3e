// policy_loss: the kernels of rlk/kernels/policy_kernels.h on CUDA. From compute capability 9.0 on each is launched while
// the one before it runs, and waits for its results. One body for every architecture; each gets its own machine code.
// Bound by HBM: the arrays of tokens are read once (twice where a ratio is a sequence's), the gradients written once.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/token_gpu.cuh"
#include "kernels.h"
#include "rlk/kernels/policy_kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

__global__ void __launch_bounds__(kTokenThreads, 2)
    policy_statistics_kernel(const __grid_constant__ PolicyLossParams p, const PolicyWorkspace w, std::int64_t slots,
                             int tile) {
  __shared__ WaveResults shared;
  policy_statistics<TokenGpu>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads, 1)
    policy_sequences_kernel(const __grid_constant__ PolicyLossParams p, const PolicyWorkspace w, int tile, int lanes) {
  __shared__ GatheredSums shared;
  wait_for_previous_kernel();
  policy_sequences<TokenGpu>(p, w, tile, lanes, blockIdx.x, &shared);
  allow_next_kernel();
}

template <PolicyForm kForm>
__global__ void __launch_bounds__(kTokenThreads, kForm == PolicyForm::kClipped ? 2 : 1)
    policy_tokens_kernel(const __grid_constant__ PolicyLossParams p, const PolicyWorkspace w, std::int64_t slots,
                         int tile) {
  __shared__ WaveResults shared;
  wait_for_previous_kernel();
  policy_tokens<TokenGpu, kForm>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads, 1)
    policy_sums_kernel(const __grid_constant__ PolicyLossParams p, const PolicyWorkspace w, int tile, int lanes) {
  __shared__ BatchSumsShared<PolicyBatch> shared;
  wait_for_previous_kernel();
  policy_sums<TokenGpu>(p, w, tile, lanes, gridDim.x, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads)
    policy_results_kernel(const __grid_constant__ PolicyLossParams p, const PolicyWorkspace w,
                          std::int64_t num_blocks) {
  __shared__ BatchResultsShared<PolicyBatch> shared;
  wait_for_previous_kernel();
  policy_results<TokenGpu>(p, w, num_blocks, &shared);
}

__global__ void __launch_bounds__(kTokenThreads)
    scale_gradients_kernel(const __grid_constant__ ScaleGradientsParams p) {
  scale_values<TokenGpu>(p, blockIdx.x, gridDim.x);
}

// The first kernel of a call waits for whatever the stream holds.
template <bool kOverlap>
void run_policy_loss(const PolicyLossParams& p, const TokenPlan& plan, cudaStream_t stream) {
  const PolicyPasses passes(p, plan.tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const PolicyWorkspace w(p.sequences, plan.tile, p.workspace);
  RLK_CHECK(passes.token_blocks < std::int64_t{1} << 31, "policy_loss: too many tokens for one launch");
  RLK_CHECK(passes.sequence_blocks < std::int64_t{1} << 31, "policy_loss: too many sequences for one launch");
  const int token_blocks = static_cast<int>(passes.token_blocks), tile = plan.tile;
  const int sequence_blocks = static_cast<int>(passes.sequence_blocks), lanes = passes.lanes;
  bool is_first = true;
  const auto launch = [&](auto* kernel, int blocks, int threads, const auto&... args) {
    is_first ? launch_dependent<false>(kernel, blocks, threads, 0, stream, p, w, args...)
             : launch_dependent<kOverlap>(kernel, blocks, threads, 0, stream, p, w, args...);
    is_first = false;
  };
  if (passes.counts) {
    launch(policy_statistics_kernel, token_blocks > 0 ? token_blocks : 1, kTokenThreads, passes.slots, tile);
    launch(policy_sequences_kernel, sequence_blocks, kGatherThreads, tile, lanes);
  }
  if (token_blocks > 0) {
    const auto launch_tokens = [&](auto* kernel) { launch(kernel, token_blocks, kTokenThreads, passes.slots, tile); };
    switch (form_of(p)) {
      case PolicyForm::kClipped:
        launch_tokens(policy_tokens_kernel<PolicyForm::kClipped>);
        break;
      case PolicyForm::kTokens:
        launch_tokens(policy_tokens_kernel<PolicyForm::kTokens>);
        break;
      case PolicyForm::kSequences:
        launch_tokens(policy_tokens_kernel<PolicyForm::kSequences>);
    }
  }
  launch(policy_sums_kernel, sequence_blocks, kGatherThreads, tile, lanes);
  if (sequence_blocks > 1) launch(policy_results_kernel, 1, kGatherThreads, passes.sequence_blocks);
}

inline void run_scale_gradients(const ScaleGradientsParams& p, cudaStream_t stream) {
  scale_gradients_kernel<<<static_cast<unsigned>(scale_blocks(p)), kTokenThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of scale_gradients");
}

}  // namespace
}  // namespace rlk::cuda
