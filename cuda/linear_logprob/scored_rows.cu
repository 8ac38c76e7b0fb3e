// Copies rows of hidden states side by side; rows that are not scored become zero. Bound by HBM.
#include "../common/launch.h"
#include "../common/vec8.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {

template <class Unit>
__global__ void __launch_bounds__(1 << kScoredLog2Threads)
    scored_rows_kernel(const __grid_constant__ ScoredRowsParams p, const RowSplit split) {
  copy_scored_rows<Unit>(p, split, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <class Unit>
void run(const ScoredRowsParams& p, cudaStream_t stream) {
  const RowSplit split = split_rows(p.row_bytes / static_cast<int>(sizeof(Unit)), kScoredUnits, kScoredLog2Threads);
  const unsigned blocks = checked_blocks(blocks_of(split, p.num_rows), "linear_logprob");
  scored_rows_kernel<Unit><<<blocks, 1 << kScoredLog2Threads, 0, stream>>>(p, split);
  check(cudaGetLastError(), "launch of scored_rows");
}

}  // namespace

namespace RLK_CUDA_ARCH {

void scored_rows(const ScoredRowsParams& p, cudaStream_t stream) {
  scored_rows_have_vectors(p) ? run<uint4>(p, stream) : run<std::uint16_t>(p, stream);
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
