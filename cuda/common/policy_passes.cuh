// Losses over tokens: the kernels of rlk/kernels/policy_kernels.h on CUDA. From compute capability 9.0 on each is launched
// while the one before it runs, and waits for its results. One body for every architecture; each gets its own machine code.
// Bound by HBM: the arrays of tokens are read once (twice where a ratio is a sequence's), the gradients written once.
#pragma once

#include "dependent_launch.cuh"
#include "rlk/kernels/policy_kernels.h"
#include "token_gpu.cuh"
#include "token_plan.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

template <class Statistics>
__global__ void __launch_bounds__(kTokenThreads, 2)
    policy_statistics_kernel(const __grid_constant__ typename Statistics::Params p, const PolicyWorkspace w,
                             std::int64_t slots, int tile) {
  __shared__ WaveResults shared;
  policy_statistics<TokenGpu, Statistics>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

template <class Params>
__global__ void __launch_bounds__(kGatherThreads, 1)
    policy_sequences_kernel(const __grid_constant__ Params p, const PolicyWorkspace w, int tile, int lanes) {
  __shared__ GatheredSums shared;
  wait_for_previous_kernel();
  policy_sequences<TokenGpu>(p, w, tile, lanes, blockIdx.x, &shared);
  allow_next_kernel();
}

template <class Terms, int kLeastBlocks>
__global__ void __launch_bounds__(kTokenThreads, kLeastBlocks)
    policy_tokens_kernel(const __grid_constant__ typename Terms::Params p, const PolicyWorkspace w, std::int64_t slots,
                         int tile) {
  __shared__ WaveResults shared;
  wait_for_previous_kernel();
  policy_tokens<TokenGpu, Terms>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

template <class Params>
__global__ void __launch_bounds__(kGatherThreads, 1)
    policy_sums_kernel(const __grid_constant__ Params p, const PolicyWorkspace w, int tile, int lanes) {
  __shared__ PolicySumsShared shared;
  wait_for_previous_kernel();
  policy_sums<TokenGpu>(p, w, tile, lanes, gridDim.x, blockIdx.x, &shared);
  allow_next_kernel();
}

template <class Params>
__global__ void __launch_bounds__(kGatherThreads)
    policy_results_kernel(const __grid_constant__ Params p, const PolicyWorkspace w, std::int64_t num_blocks) {
  __shared__ PolicyResultsShared shared;
  wait_for_previous_kernel();
  policy_results<TokenGpu>(p, w, num_blocks, &shared);
}

template <class Params>
using TokensKernel = void (*)(Params, PolicyWorkspace, std::int64_t, int);

// The first kernel of a call waits for whatever the stream holds.
template <bool kOverlap, class Statistics, class Params>
void run_policy_passes(const Params& p, const PolicyPlan& plan, TokensKernel<Params> tokens_kernel,
                       cudaStream_t stream) {
  const PolicyPasses passes(p, plan.tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const PolicyWorkspace w(p.sequences, plan.tile, p.workspace);
  RLK_CHECK(passes.token_blocks < std::int64_t{1} << 31, "too many tokens for one launch");
  RLK_CHECK(passes.sequence_blocks < std::int64_t{1} << 31, "too many sequences for one launch");
  const int token_blocks = static_cast<int>(passes.token_blocks), tile = plan.tile;
  const int sequence_blocks = static_cast<int>(passes.sequence_blocks), lanes = passes.lanes;
  bool is_first = true;
  const auto launch = [&](auto* kernel, int blocks, int threads, const auto&... args) {
    is_first ? launch_dependent<false>(kernel, blocks, threads, 0, stream, p, w, args...)
             : launch_dependent<kOverlap>(kernel, blocks, threads, 0, stream, p, w, args...);
    is_first = false;
  };
  if (passes.counts) {
    launch(policy_statistics_kernel<Statistics>, token_blocks > 0 ? token_blocks : 1, kTokenThreads, passes.slots,
           tile);
    launch(policy_sequences_kernel<Params>, sequence_blocks, kGatherThreads, tile, lanes);
  }
  if (token_blocks > 0) launch(tokens_kernel, token_blocks, kTokenThreads, passes.slots, tile);
  launch(policy_sums_kernel<Params>, sequence_blocks, kGatherThreads, tile, lanes);
  if (sequence_blocks > 1) launch(policy_results_kernel<Params>, 1, kGatherThreads, passes.sequence_blocks);
}

}  // namespace
}  // namespace rlk::cuda
