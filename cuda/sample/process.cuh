// Rows of process_logits: a block has a row. The body is rlk/kernels/process_logits.h, shared with the CPU and HIP.
// Bound by one read of the logits, and by two writes and one read of the output. One body serves every architecture.
#pragma once

#include "team.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

template <class T>
__global__ void __launch_bounds__(kRowThreads) process_logits_kernel(const __grid_constant__ ProcessLogitsParams p) {
  process_row<BlockTeam<kRowThreads>, T>(BlockTeam<kRowThreads>(), p, blockIdx.x);
}

inline void run(const ProcessLogitsParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.num_rows);
  const auto launch = [&](auto type) { process_logits_kernel<decltype(type)><<<blocks, kRowThreads, 0, stream>>>(p); };
  p.dtype == DType::kFloat32 ? launch(Fp32()) : p.dtype == DType::kBFloat16 ? launch(Bf16()) : launch(Fp16());
  check(cudaGetLastError(), "launch of process_logits");
}

}  // namespace
}  // namespace rlk::cuda
