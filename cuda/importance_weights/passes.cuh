// importance_weights: the kernels of rlk/kernels/importance_kernels.h on CUDA. From compute capability 9.0 on each is launched
// while the one before it runs, and waits for its results. One body for every architecture; each gets its own machine code.
// Bound by HBM: the log-probabilities and the mask are read once, or twice where something is a sequence's, weights and what
// is kept are written once; with normalize weights are read and written once more.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/token_gpu.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

__global__ void __launch_bounds__(kTokenThreads, 2)
    importance_statistics_kernel(const __grid_constant__ ImportanceWeightsParams p, const ImportanceWorkspace w,
                                 std::int64_t slots, int tile) {
  __shared__ WaveResults shared;
  importance_statistics<TokenGpu>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads, 1)
    importance_sequences_kernel(const __grid_constant__ ImportanceWeightsParams p, const ImportanceWorkspace w,
                                int tile, int lanes) {
  __shared__ GatheredSums shared;
  wait_for_previous_kernel();
  importance_sequences<TokenGpu>(p, w, tile, lanes, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kTokenThreads, 2)
    importance_tokens_kernel(const __grid_constant__ ImportanceWeightsParams p, const ImportanceWorkspace w,
                             std::int64_t slots, int tile) {
  __shared__ WaveResults shared;
  wait_for_previous_kernel();
  importance_tokens<TokenGpu>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads, 1)
    importance_sums_kernel(const __grid_constant__ ImportanceWeightsParams p, const ImportanceWorkspace w, int tile,
                           int lanes) {
  __shared__ BatchSumsShared<ImportanceBatch> shared;
  wait_for_previous_kernel();
  importance_sums<TokenGpu>(p, w, tile, lanes, gridDim.x, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads)
    importance_results_kernel(const __grid_constant__ ImportanceWeightsParams p, const ImportanceWorkspace w,
                              std::int64_t num_blocks) {
  __shared__ BatchResultsShared<ImportanceBatch> shared;
  wait_for_previous_kernel();
  importance_results<TokenGpu>(p, w, num_blocks, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kTokenThreads)
    importance_divide_kernel(const __grid_constant__ ImportanceWeightsParams p, const ImportanceWorkspace w,
                             std::int64_t count) {
  wait_for_previous_kernel();
  importance_divide<TokenGpu>(p, w, count, blockIdx.x, gridDim.x);
}

// The first kernel of a call waits for whatever the stream holds.
template <bool kOverlap>
void run_importance_weights(const ImportanceWeightsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  const TokenPasses passes(p.sequences, plan.tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const ImportanceWorkspace w(p.sequences, plan.tile, p.workspace);
  RLK_CHECK(passes.token_blocks < std::int64_t{1} << 31, "importance_weights: too many tokens for one launch");
  RLK_CHECK(passes.sequence_blocks < std::int64_t{1} << 31, "importance_weights: too many sequences for one launch");
  const int token_blocks = static_cast<int>(passes.token_blocks), tile = plan.tile;
  const int sequence_blocks = static_cast<int>(passes.sequence_blocks), lanes = passes.lanes;
  bool is_first = true;
  const auto launch = [&](auto* kernel, int blocks, int threads, const auto&... args) {
    is_first ? launch_dependent<false>(kernel, blocks, threads, 0, stream, p, w, args...)
             : launch_dependent<kOverlap>(kernel, blocks, threads, 0, stream, p, w, args...);
    is_first = false;
  };
  if (token_blocks == 0) return;
  if (needs_statistics(p.spec)) {
    launch(importance_statistics_kernel, token_blocks, kTokenThreads, passes.slots, tile);
    launch(importance_sequences_kernel, sequence_blocks, kGatherThreads, tile, lanes);
  }
  launch(importance_tokens_kernel, token_blocks, kTokenThreads, passes.slots, tile);
  if (p.spec.normalize == 0) return;
  launch(importance_sums_kernel, sequence_blocks, kGatherThreads, tile, lanes);
  if (sequence_blocks > 1) launch(importance_results_kernel, 1, kGatherThreads, passes.sequence_blocks);
  const std::int64_t count = p.sequences.num_slots();
  launch(importance_divide_kernel, static_cast<int>(map_blocks(count)), kTokenThreads, count);
}

}  // namespace
}  // namespace rlk::cuda
