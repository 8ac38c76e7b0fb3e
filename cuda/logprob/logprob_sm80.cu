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
  merge_row(p, row);
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
