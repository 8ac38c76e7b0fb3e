// The forward of logprob on CUDA: stream.cuh for any number of rows, clusters for few rows on sm_90, and the merge of
// shards. CMake compiles this file once per architecture. HBM limits the speed: each logit is read once (vocab_size *
// sizeof(T) bytes per row). README.md has measurements.
#include "../common/kernels.h"
#include "kernels/vocabulary/logprob_groups.h"
#include "stream.cuh"
#if RLK_CUDA_SM90
#include "clusters_sm90.cuh"
#endif

namespace rlk::cuda {
namespace {

#if RLK_CUDA_SM90
// Warps per block, each with a buffer in shared memory: as many as fit, for elements of 4 bytes (14) and of 2 bytes.
// With moments there are fewer warps, since each thread needs more registers.
template <class T, bool kMoments>
constexpr int kStreamWarps = !T::kPacked ? 14
                             : kMoments  ? 20
                                         : 27;
#else
// Warps per block, each with a buffer in shared memory: as many as fit on compute capability 8.0, for elements of 2 and
// of 4 bytes. Other capabilities that run this code have less shared memory, and run fewer warps.
template <class T, bool kMoments>
constexpr int kStreamWarps = T::kPacked ? 19 : 9;
#endif

__global__ void logprob_merge_kernel(const __grid_constant__ LogprobMergeParams p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= p.num_rows) return;
  merge_row(p, row);
}

}  // namespace

namespace RLK_CUDA_ARCH {

void logprob_forward(const LogprobParams& p, const GroupGrid& grid, LogprobPlan plan, cudaStream_t stream) {
  with_variant(p, [&]<class T, Exp kExp, bool kMoments>(Variant<T, kExp, kMoments>) {
#if RLK_CUDA_SM90
    if (plan == LogprobPlan::kClusters) return run_clusters<T, kExp, kMoments>(p, grid, stream);
#endif
    run_stream<T, kExp, kMoments, kStreamWarps<T, kMoments>, kOverlap>(p, grid, stream);
  });
}

void logprob_merge(const LogprobMergeParams& p, cudaStream_t stream) {
  constexpr int kThreads = 128;
  logprob_merge_kernel<<<static_cast<unsigned>((p.num_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch of logprob_merge");
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
