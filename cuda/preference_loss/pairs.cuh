// preference_loss and its gradient, bound by their launches: a few numbers a pair. The formulas stand in
// rlk/kernels/preference_pair.h, shared with the CPU and HIP.
//
// preference_pairs_kernel: a thread a pair; where losses are sorted, their keys are put in order before it
// (rlk/kernels/merge_order.h). preference_metrics_kernel: a block a metric, 256 threads a chunk of 2,048 pairs, after it.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "kernels.h"
#include "rlk/ops/sequence_logprob.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kPairThreads = 128;

constexpr int kMetricThreads = 1024;

__global__ void __launch_bounds__(kOrderThreads)
    preference_order_kernel(const __grid_constant__ PreferenceLossParams p, bool first) {
  __shared__ OrderShared shared;
  preference_order_run<PlainMemory>(
      p, {blockIdx.x, gridDim.x / 2}, first, static_cast<int>(threadIdx.x), shared, [] { __syncthreads(); },
      [] { __syncwarp(); });
}
__global__ void __launch_bounds__(kPairThreads)
    preference_merge_kernel(const __grid_constant__ PreferenceLossParams p, std::int32_t run, bool from_first) {
  const PreferenceHalf half(blockIdx.x, gridDim.x / 2);
  const std::int64_t at = std::int64_t{half.block} * kPairThreads + threadIdx.x;
  if (at < p.chosen.num) preference_merge<PlainMemory>(p, half.which, static_cast<std::int32_t>(at), run, from_first);
}
__global__ void __launch_bounds__(kPairThreads)
    preference_pairs_kernel(const __grid_constant__ PreferenceLossParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kPairThreads + threadIdx.x;
  if (i >= preference_losses(p)) return;
  if (p.sort != PreferenceSort::kNone) preference_ranks<PlainMemory>(p, i);
  preference_item<PlainMemory>(p, i);
}

// By a block, 256 threads a chunk, each with a lane of it; thread 0 gets it.
__device__ __forceinline__ float sum_of_metric(const PreferenceLossParams& p, int metric) {
  constexpr int kChunks = kMetricThreads / kSequenceLanes, kWarps = kSequenceLanes / 32;
  constexpr int kSteps = kSequenceChunk / kSequenceLanes;
  __shared__ float warps[kChunks][kWarps];
  const int chunk = static_cast<int>(threadIdx.x) / kSequenceLanes,
            lane = static_cast<int>(threadIdx.x) % kSequenceLanes;
  const std::int64_t num = preference_metric_items(p, metric);
  float sum = 0.0f;
#pragma unroll 1
  for (std::int64_t round = 0; round < num; round += kChunks * kSequenceChunk) {
    const std::int64_t first = round + chunk * kSequenceChunk + lane;
    float x[kSteps], node = 0.0f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const std::int64_t i = first + k * kSequenceLanes;
      x[k] = i < num ? preference_metric_item<PlainMemory>(p, metric, i) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) node = add_rn(node, x[k]);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      node = add_rn(node, __shfl_xor_sync(0xffffffffu, node, distance));
    }
    __syncthreads();
    if (lane % 32 == 0) warps[chunk][lane / 32] = node;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {  // +0 of missing ones changes no bit
      const float(&w)[kWarps] = warps[c];
      sum = add_rn(
          sum, add_rn(add_rn(add_rn(w[0], w[1]), add_rn(w[2], w[3])), add_rn(add_rn(w[4], w[5]), add_rn(w[6], w[7]))));
    }
  }
  return sum;
}
__global__ void __launch_bounds__(kMetricThreads)
    preference_metrics_kernel(const __grid_constant__ PreferenceLossParams p) {
  const int metric = static_cast<int>(blockIdx.x);
  float mean = canonical_nan();
  if (p.kind != Preference::kKto || metric < 3) {
    mean = preference_mean(p, metric, sum_of_metric(p, metric));
  } else if (metric == 3) {
    const float chosen = preference_mean(p, 1, sum_of_metric(p, 1));
    mean = sub_rn(chosen, preference_mean(p, 2, sum_of_metric(p, 2)));
  }
  if (threadIdx.x == 0) p.metrics[metric] = one_nan(mean);
}
__global__ void __launch_bounds__(kPairThreads)
    preference_backward_kernel(const __grid_constant__ PreferenceLossBackwardParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kPairThreads + threadIdx.x;
  if (i < p.chosen.num + p.rejected.num) preference_gradient<PlainMemory>(p, i);
}

inline unsigned pair_blocks(std::int64_t items) {
  return static_cast<unsigned>((items + kPairThreads - 1) / kPairThreads);
}

inline void run_preference_loss(const PreferenceLossParams& p, cudaStream_t stream) {
  const std::int64_t losses = preference_losses(p);
  if (losses > 0) {
    if (p.sort != PreferenceSort::kNone) {
      const auto runs = static_cast<unsigned>(order_runs(p.chosen.num));
      preference_order_kernel<<<2 * runs, kOrderThreads, 0, stream>>>(p, order_begins_first(p.chosen.num));
      for_each_merge(p.chosen.num, [&](std::int32_t run, bool from_first) {
        preference_merge_kernel<<<2 * pair_blocks(p.chosen.num), kPairThreads, 0, stream>>>(p, run, from_first);
      });
    }
    preference_pairs_kernel<<<pair_blocks(losses), kPairThreads, 0, stream>>>(p);
  }
  preference_metrics_kernel<<<kPreferenceMetrics, kMetricThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of preference_loss");
}
inline void run_preference_loss_backward(const PreferenceLossBackwardParams& p, cudaStream_t stream) {
  preference_backward_kernel<<<pair_blocks(p.chosen.num + p.rejected.num), kPairThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of preference_loss_backward");
}

}  // namespace
}  // namespace rlk::cuda
