// The gradient of attention's sinks (an extra score per query head), which needs only lse and delta. A block of threads
// sums one query head; each of its threads sums a group of 64 rows. Memory latency limits the speed, since a thread
// reads its rows one after another.
#pragma once

#include "gpu.cuh"
#include "kernels/attention/sinks.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

__global__ void __launch_bounds__(kSinkGroups)
    attention_sinks_kernel(const __grid_constant__ AttentionBackwardParams p, const float* delta, std::int64_t rows) {
  __shared__ float sums[kSinkGroups];
  attention_sink_gradient<AttentionGpu>(p, delta, rows, blockIdx.x, sums);
}

// `delta`: one value for each row, in the layout of lse.
inline void run_attention_sinks(const AttentionBackwardParams& p, const float* delta, cudaStream_t stream) {
  const unsigned heads = checked_blocks(p.num_q_heads, "attention_backward");
  if (heads == 0) return;
  attention_sinks_kernel<<<heads, kSinkGroups, 0, stream>>>(p, delta, attention_rows(p));
  check(cudaGetLastError(), "launch of attention's dsinks");
}

}  // namespace
}  // namespace rlk::cuda
