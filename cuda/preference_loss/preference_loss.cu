// preference_loss and its gradient. Launches limit the speed, because a pair has only a few numbers. The header
// kernels/losses/preference_pair.h, shared with the CPU and HIP, has the formulas.
//
// preference_pairs_kernel: each thread computes one pair. For sorted losses, kernels/advantages/merge_order.h sorts the
// keys first. preference_metrics_kernel runs after preference_pairs_kernel: each block computes one metric. All
// architectures share this source; each has its own machine code.
#include "../common/kernels.h"
#include "../common/team.cuh"
#include "kernels/losses/preference_pair.h"
#include "kernels/tokens/team_sum.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

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

// A block computes one metric, and every thread of the block gets the result.
__device__ __forceinline__ float sum_of_metric(const PreferenceLossParams& p, int metric) {
  __shared__ float sums[kMetricThreads / 32];
  return sum_of_block(WarpBlock{Warp(), sums}, preference_metric_items(p, metric),
                      [&](std::int64_t i) { return preference_metric_item<PlainMemory>(p, metric, i); });
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

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void preference_loss(const PreferenceLossParams& p, cudaStream_t stream) {
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

void preference_loss_backward(const PreferenceLossBackwardParams& p, cudaStream_t stream) {
  preference_backward_kernel<<<pair_blocks(p.chosen.num + p.rejected.num), kPairThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of preference_loss_backward");
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
