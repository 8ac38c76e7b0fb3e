// mismatch_metrics: the kernels of rlk/kernels/mismatch_kernels.h on CUDA. From compute capability 9.0 on each is launched
// while the one before it runs, and waits for its results. One body for every architecture; each gets its own machine code.
// Bound by arithmetic: nine bytes of a token, and five exponentials.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/token_gpu.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

__global__ void __launch_bounds__(kTokenThreads, 2)
    mismatch_tokens_kernel(const __grid_constant__ MismatchMetricsParams p, const MismatchWorkspace w,
                           std::int64_t slots, int tile) {
  __shared__ WaveResults shared;
  wait_for_previous_kernel();
  mismatch_tokens<TokenGpu>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads, 1)
    mismatch_sums_kernel(const __grid_constant__ MismatchMetricsParams p, const MismatchWorkspace w, int tile,
                         int lanes) {
  __shared__ BatchSumsShared<MismatchBatch> shared;
  wait_for_previous_kernel();
  mismatch_sums<TokenGpu>(p, w, tile, lanes, gridDim.x, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kGatherThreads)
    mismatch_results_kernel(const __grid_constant__ MismatchMetricsParams p, const MismatchWorkspace w,
                            std::int64_t num_blocks) {
  __shared__ BatchResultsShared<MismatchBatch> shared;
  wait_for_previous_kernel();
  mismatch_results<TokenGpu>(p, w, num_blocks, &shared);
}

// The first kernel of a call waits for whatever the stream holds.
template <bool kOverlap>
void run_mismatch_metrics(const MismatchMetricsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  const TokenPasses passes(p.sequences, plan.tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const MismatchWorkspace w(p.sequences, plan.tile, p.workspace);
  RLK_CHECK(passes.token_blocks < std::int64_t{1} << 31, "mismatch_metrics: too many tokens for one launch");
  RLK_CHECK(passes.sequence_blocks < std::int64_t{1} << 31, "mismatch_metrics: too many sequences for one launch");
  const int token_blocks = static_cast<int>(passes.token_blocks), tile = plan.tile;
  const int sequence_blocks = static_cast<int>(passes.sequence_blocks), lanes = passes.lanes;
  bool is_first = true;
  const auto launch = [&](auto* kernel, int blocks, int threads, const auto&... args) {
    is_first ? launch_dependent<false>(kernel, blocks, threads, 0, stream, p, w, args...)
             : launch_dependent<kOverlap>(kernel, blocks, threads, 0, stream, p, w, args...);
    is_first = false;
  };
  if (token_blocks > 0) launch(mismatch_tokens_kernel, token_blocks, kTokenThreads, passes.slots, tile);
  launch(mismatch_sums_kernel, sequence_blocks, kGatherThreads, tile, lanes);
  if (sequence_blocks > 1) launch(mismatch_results_kernel, 1, kGatherThreads, passes.sequence_blocks);
}

}  // namespace
}  // namespace rlk::cuda
