// preference_loss and its gradient, bound by their launches: a few numbers a pair. The formulas stand in
// rlk/kernels/preference_pair.h, shared with the CPU and HIP.
//
// preference_pairs_kernel: a thread a pair. preference_rank_kernel, before it where losses are sorted: a thread a key, whose
// rank it counts. preference_metrics_kernel: one block, after it.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kPairThreads = 128;

__global__ void __launch_bounds__(kPairThreads) preference_rank_kernel(const __grid_constant__ PreferenceLossParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kPairThreads + threadIdx.x;
  if (i < 2 * p.chosen.num) preference_rank<PlainMemory>(p, i);
}
__global__ void __launch_bounds__(kPairThreads)
    preference_pairs_kernel(const __grid_constant__ PreferenceLossParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kPairThreads + threadIdx.x;
  if (i < preference_losses(p)) preference_item<PlainMemory>(p, i);
}
__global__ void __launch_bounds__(kPreferenceMetricThreads)
    preference_metrics_kernel(const __grid_constant__ PreferenceLossParams p) {
  __shared__ float lanes[kPreferenceMetricThreads];
  preference_metrics_block<PlainMemory>(p, static_cast<int>(threadIdx.x), lanes, [] { __syncthreads(); });
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
      preference_rank_kernel<<<pair_blocks(2 * p.chosen.num), kPairThreads, 0, stream>>>(p);
    }
    preference_pairs_kernel<<<pair_blocks(losses), kPairThreads, 0, stream>>>(p);
  }
  preference_metrics_kernel<<<1, kPreferenceMetricThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of preference_loss");
}
inline void run_preference_loss_backward(const PreferenceLossBackwardParams& p, cudaStream_t stream) {
  preference_backward_kernel<<<pair_blocks(p.chosen.num + p.rejected.num), kPairThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of preference_loss_backward");
}

}  // namespace
}  // namespace rlk::cuda
