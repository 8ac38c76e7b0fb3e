// logprob for SM80 and later. Few rows: one warp per group of 32 leaves, nodes through global memory, then one warp per
// row. Many rows: stream.cuh.
// Bound by HBM: each logit is read once (vocab_size * sizeof(T) bytes a row). Numbers: README.md.
#include "../common/kernel_memory.h"
#include "kernels.h"
#include "stream.cuh"

namespace rlk::cuda {
namespace {

// What shared memory of compute capability 8.0 holds of 2-byte and 4-byte groups; others have less and run fewer.
template <class T>
constexpr int kStreamWarps = T::kPacked ? 19 : 9;

template <class T, Exp kExp, bool kMoments>
void run(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  run_stream<T, kExp, kMoments, kStreamWarps<T>, false>(p, grid, stream);
}

template <class T>
void run(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  const bool moments = p.stats || p.entropy || p.sum_p_sq;
  if (p.exp == Exp::kHardware) {
    moments ? run<T, Exp::kHardware, true>(p, grid, stream) : run<T, Exp::kHardware, false>(p, grid, stream);
  } else {
    moments ? run<T, Exp::kPortable, true>(p, grid, stream) : run<T, Exp::kPortable, false>(p, grid, stream);
  }
}

__global__ void logprob_merge_sm80_kernel(const __grid_constant__ LogprobMergeParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= p.num_rows) return;
  SoftmaxStats node[kNumParts];
  float target_z = canonical_nan();
#pragma unroll
  for (int i = 0; i < kNumParts; ++i) {
    node[i] = identity_stats();
    if (i < p.num_shards) {
      const float* s = p.stats + (i * p.num_rows + row) * kStatsFields;
      node[i] = {s[0], s[1], s[2], s[3]};
      if (!is_nan(s[4])) target_z = s[4];
    }
  }
#pragma unroll
  for (int distance = 1; distance < kNumParts; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kNumParts; i += 2 * distance) node[i] = combine(node[i], node[i + distance]);
  }
  const float temperature = p.temperature ? p.temperature[row] : p.temperature_value;
  const LogprobOutputs o = logprob_outputs(node[0], target_z, temperature);
  if (p.logprob) p.logprob[row] = o.logprob;
  if (p.lse) p.lse[row] = o.lse;
  if (p.entropy) p.entropy[row] = o.entropy;
  if (p.sum_p_sq) p.sum_p_sq[row] = o.sum_p_sq;
  if (p.status) p.status[row] = o.status;
}

}  // namespace

void logprob_forward_sm80(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run<Fp32>(p, grid, stream);
    case DType::kBFloat16:
      return run<Bf16>(p, grid, stream);
    default:
      return run<Fp16>(p, grid, stream);
  }
}

void logprob_merge_sm80(const LogprobMergeParams& p, cudaStream_t stream) {
  constexpr int kThreads = 128;
  logprob_merge_sm80_kernel<<<static_cast<unsigned>((p.num_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of logprob_merge");
}

}  // namespace rlk::cuda
