// sample_partial: each block computes one row. The headers kernels/sample/shard.h and round.h, shared with the CPU and
// HIP, have the code for a row. Reads of the shard limit the speed: one read without truncation, two reads if top-k
// leaves few columns. All architectures share this source; each has its own machine code.
#include "kernels/sample/round.h"
#include "kernels/sample/shard.h"
#include "launches.cuh"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

using RowTeam = BlockTeam<kRowThreads>;
constexpr int kSharedBytes = sizeof(SampleShared);

// A launch computes the tree of a shard's kept columns, the draw in this tree, or the tree for the raw log-probability.
enum class TreePass { kTree, kDraw, kRaw };
// A draw needs one leaf, which one warp computes.
template <TreePass kPass>
constexpr int kTreeThreads = kPass == TreePass::kDraw ? 32 : kRowThreads;

template <class T>
__global__ void __launch_bounds__(kRowThreads, 3)
    sample_shard_kernel(const __grid_constant__ SamplePartialParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ChunkRow own = row_of(p, chunk, blockIdx.x);
  RowOfShard<RowTeam, T>(RowTeam(), p, own.row, reinterpret_cast<SampleShared*>(memory), own.mask, own.state,
                         own.firsts)
      .run();
}

template <class T, Exp kExp>
__global__ void __launch_bounds__(kRowThreads, 2)
    sample_round_kernel(const __grid_constant__ SamplePartialParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ChunkRow own = row_of(p, chunk, blockIdx.x);
  RowOfRound<RowTeam, T, kExp>(RowTeam(), p, own.row, reinterpret_cast<SampleShared*>(memory), own.mask, own.state,
                               own.firsts, own.sorted)
      .run();
}

template <Exp kExp>
__global__ void __launch_bounds__(kRowThreads, 3)
    sample_cut_kernel(const __grid_constant__ SamplePartialParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ChunkRow own = row_of(p, chunk, blockIdx.x);
  RowOfCut<RowTeam, kExp>(RowTeam(), p, own.row, reinterpret_cast<SampleShared*>(memory), own.mask, own.state,
                          own.firsts)
      .run();
}

// Blocks that fit on a multiprocessor. With two blocks on sm_80, a shard's tree would spill registers.
template <TreePass kPass>
constexpr int kShardTreeBlocks = kPass == TreePass::kDraw ? 16
                                 : RLK_CUDA_SM90          ? 2
                                                          : 1;

template <class T, Exp kExp, TreePass kPass>
__global__ void __launch_bounds__(kTreeThreads<kPass>, kShardTreeBlocks<kPass>)
    sample_shard_tree_kernel(const __grid_constant__ SamplePartialParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const ChunkRow own = row_of(p, chunk, blockIdx.x);
  using Team = BlockTeam<kTreeThreads<kPass>>;
  TreeOfShard<Team, T, kExp> tree(Team(), p, own.row, reinterpret_cast<SampleShared*>(memory), own.mask, own.state,
                                  own.nodes);
  if constexpr (kPass == TreePass::kTree) {
    tree.run_tree(p.kept_offsets == nullptr ? nullptr : p.kept_offsets + own.row + 1);
  } else if constexpr (kPass == TreePass::kDraw) {
    tree.run_draw();
  } else {
    tree.run_raw();
  }
}

template <class T, Exp kExp, TreePass kPass>
void run_shard_tree(const SamplePartialParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  constexpr int kBytes = kPass == TreePass::kDraw ? 0 : kSharedBytes;
  sample_shard_tree_kernel<T, kExp, kPass>
      <<<static_cast<unsigned>(chunk.rows), kTreeThreads<kPass>, kBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample_partial's tree");
}

}  // namespace

namespace RLK_CUDA_ARCH {

void sample_partial(const SamplePartialParams& p, cudaStream_t stream) {
  const SamplePartialParams of_raw = raw_pass(p);
  const bool in_rounds = p.round > 0, has_tree = !in_rounds || p.round == kRounds;
  for (std::int64_t first = 0; first < p.num_rows; first += sample_chunk_rows(p)) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    const auto blocks = static_cast<unsigned>(chunk.rows);
    by_type_and_mode(p, [&]<class T, Exp kExp>() {
      if (!in_rounds) {
        sample_shard_kernel<T><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
      } else if (has_tree) {
        sample_cut_kernel<kExp><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
      } else {
        sample_round_kernel<T, kExp><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
      }
      check(cudaGetLastError(), "launch of sample_partial's ranks");
      if (!has_tree) return;
      run_shard_tree<T, kExp, TreePass::kTree>(p, chunk, stream);
      run_shard_tree<T, kExp, TreePass::kDraw>(p, chunk, stream);
    });
    if (p.takes_raw && has_tree) {
      by_type_and_mode(of_raw,
                       [&]<class T, Exp kExp>() { run_shard_tree<T, kExp, TreePass::kRaw>(of_raw, chunk, stream); });
    }
    sample_kept(p, chunk, stream);
  }
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
