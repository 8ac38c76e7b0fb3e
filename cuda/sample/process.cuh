// process_logits: a block has a tile of a row's columns, whose counts stand in shared memory, and reads all of the row's
// history. The body is rlk/kernels/process_logits.h, shared with the CPU and HIP. Bound by HBM: one read of the logits
// and one write of the output. One body serves every architecture.
#pragma once

#include "team.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kProcessColumns = 8192;

template <class T>
__global__ void __launch_bounds__(kRowThreads) process_logits_kernel(const __grid_constant__ ProcessLogitsParams p) {
  __shared__ std::uint32_t words[kProcessColumns], found;
  const std::int64_t row = blockIdx.x, begin = std::int64_t{blockIdx.y} * kProcessColumns;
  const std::int64_t end = begin + kProcessColumns < p.num_columns ? begin + kProcessColumns : p.num_columns;
  process_columns<BlockTeam<kRowThreads>, T>(BlockTeam<kRowThreads>(), p, row, begin, end, words, &found);
  if (begin == 0 && threadIdx.x == 0) p.status[row] = static_cast<std::int32_t>(found);
}

inline void run(const ProcessLogitsParams& p, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((p.num_columns + kProcessColumns - 1) / kProcessColumns);
  const dim3 blocks(static_cast<unsigned>(p.num_rows), tiles > 0 ? tiles : 1);
  const auto launch = [&](auto type) { process_logits_kernel<decltype(type)><<<blocks, kRowThreads, 0, stream>>>(p); };
  p.dtype == DType::kFloat32 ? launch(Fp32()) : p.dtype == DType::kBFloat16 ? launch(Bf16()) : launch(Fp16());
  check(cudaGetLastError(), "launch of process_logits");
}

}  // namespace
}  // namespace rlk::cuda
