// Labels and masks of tokens: a thread a token, or a block a sequence where a token depends on those before it. What is
// computed stands in rlk/kernels/token_labels.h, shared with the CPU and HIP.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kTokenThreads = 256;

__global__ void __launch_bounds__(kTokenThreads) shift_labels_kernel(const __grid_constant__ ShiftLabelsParams p) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (i < p.num_tokens / p.cp_size) write_label<PlainMemory>(p, i);
}
__global__ void __launch_bounds__(kTokenThreads)
    span_mask_kernel(const __grid_constant__ SpanMaskParams p, std::int64_t items) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (i < items) write_span_flag<PlainMemory>(p, i);
}
__global__ void __launch_bounds__(kTurnThreads) tool_mask_kernel(const __grid_constant__ ToolMaskParams p) {
  __shared__ std::int64_t events[2 * kTurnThreads];
  tool_mask_block<PlainMemory>(p, blockIdx.x, static_cast<int>(threadIdx.x), events, [] { __syncthreads(); });
}

inline unsigned token_blocks(std::int64_t items) {
  const std::int64_t blocks = (items + kTokenThreads - 1) / kTokenThreads;
  RLK_CHECK(blocks < std::int64_t{1} << 31, "too many tokens for one launch");
  return static_cast<unsigned>(blocks);
}

inline void run(const ShiftLabelsParams& p, cudaStream_t stream) {
  shift_labels_kernel<<<token_blocks(p.num_tokens / p.cp_size), kTokenThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of shift_labels_packed");
}
inline void run(const SpanMaskParams& p, cudaStream_t stream) {
  const std::int64_t items = p.cu_seqlens.data != nullptr ? p.num_tokens : p.num_sequences * p.num_tokens;
  if (items == 0) return;
  span_mask_kernel<<<token_blocks(items), kTokenThreads, 0, stream>>>(p, items);
  check(cudaGetLastError(), "launch of loss_mask_from_spans");
}
inline void run(const ToolMaskParams& p, cudaStream_t stream) {
  if (p.cu_seqlens.data != nullptr) {  // tokens of no sequence
    check(cudaMemsetAsync(p.mask, 0, static_cast<std::size_t>(p.num_tokens), stream), "clearing of tool_mask");
  }
  if (p.num_sequences == 0) return;
  tool_mask_kernel<<<static_cast<unsigned>(p.num_sequences), kTurnThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of tool_mask");
}

}  // namespace
}  // namespace rlk::cuda
