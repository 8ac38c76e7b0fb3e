// logprob for SM80 and later: stream.cuh for any number of rows, and the merge of shards.
// Bound by HBM: each logit is read once (vocab_size * sizeof(T) bytes a row). Numbers: README.md.
#include "kernels.h"
#include "stream.cuh"

namespace rlk::cuda {
namespace {

// What shared memory of compute capability 8.0 holds of 2-byte and 4-byte groups; others have less and run fewer.
template <class T>
constexpr int kStreamWarps = T::kPacked ? 19 : 9;

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
  store_outputs(p, row, logprob_outputs(node[0], target_z, temperature));
}

}  // namespace

void logprob_forward_sm80(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  with_variant(p, [&]<class T, Exp kExp, bool kMoments>(Variant<T, kExp, kMoments>) {
    run_stream<T, kExp, kMoments, kStreamWarps<T>, false>(p, grid, stream);
  });
}

void logprob_merge_sm80(const LogprobMergeParams& p, cudaStream_t stream) {
  constexpr int kThreads = 128;
  logprob_merge_sm80_kernel<<<static_cast<unsigned>((p.num_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of logprob_merge");
}

}  // namespace rlk::cuda
