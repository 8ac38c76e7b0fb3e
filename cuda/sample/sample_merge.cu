// sample_merge: each block computes one row. The header kernels/sample/merge.h, shared with the CPU and HIP, has the
// code for a row. The merge reads only the shards' payloads. All architectures share this source; each has its own
// machine code.
#include "kernels/sample/merge.h"
#include "launches.cuh"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

using RowTeam = BlockTeam<kRowThreads>;
constexpr int kSharedBytes = sizeof(SampleShared);

template <Exp kExp>
__global__ void __launch_bounds__(kRowThreads, 3)
    sample_merge_kernel(const __grid_constant__ SampleMergeParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ChunkRow own = row_of(p, chunk, blockIdx.x);
  RowOfMerge<RowTeam, kExp>(RowTeam(), p, own.row, reinterpret_cast<SampleShared*>(memory), own.mask, own.state,
                            own.firsts)
      .run(p.kept_offsets == nullptr ? nullptr : p.kept_offsets + own.row + 1);
}

template <Exp kExp>
__global__ void __launch_bounds__(kRowThreads, 2)
    sample_merge_tree_kernel(const __grid_constant__ SampleMergeParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ChunkRow own = row_of(p, chunk, blockIdx.x);
  TreeOfMerge<RowTeam, kExp>(RowTeam(), p, own.row, reinterpret_cast<SampleShared*>(memory), own.mask, own.state,
                             own.firsts, own.nodes)
      .run(p.kept_offsets == nullptr ? nullptr : p.kept_offsets + own.row + 1);
}

template <Exp kExp>
void run_merge(const SampleMergeParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(chunk.rows);
  sample_merge_kernel<kExp><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample_merge's rows");
  sample_merge_tree_kernel<kExp><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample_merge's tree");
}

}  // namespace

namespace RLK_CUDA_ARCH {

void sample_merge(const SampleMergeParams& p, cudaStream_t stream) {
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    p.exp == Exp::kHardware ? run_merge<Exp::kHardware>(p, chunk, stream) : run_merge<Exp::kPortable>(p, chunk, stream);
    sample_kept(p, chunk, stream);
  }
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
