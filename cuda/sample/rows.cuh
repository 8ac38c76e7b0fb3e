// Rows of sample: a block is a row, eight threads have a leaf; then the offsets of the kept sets by one block, and their ids
// by a block a row. What is computed stands in rlk/kernels/sample_select.h and
// sample_tree.h, shared with the CPU and HIP.
// Bound by reads of the logits: one without truncation, two where top-k leaves few columns, up to six of a large top-p set.
// One body for every architecture; each gets its own machine code.
#pragma once

#include "../common/element.cuh"
#include "kernels.h"
#include "rlk/kernels/sample_kept.h"
#include "rlk/kernels/sample_select.h"
#include "rlk/kernels/sample_tree.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kRowThreads = kMaxTeam;
constexpr int kKeptThreads = 256;

template <int kThreads>
struct BlockTeam {
  using Memory = PlainMemory;
  static constexpr int kLanes = 8, kAhead = 8;
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  static constexpr int threads() { return kThreads; }
  __device__ __forceinline__ void barrier() const { __syncthreads(); }
  __device__ __forceinline__ float shuffle_xor(float x, int distance) const {
    return __shfl_xor_sync(0xffffffffu, x, distance);
  }
  __device__ __forceinline__ std::int32_t shuffle_xor(std::int32_t x, int distance) const {
    return __shfl_xor_sync(0xffffffffu, x, distance);
  }
  __device__ __forceinline__ void add(std::uint32_t* to, std::uint32_t x) const { atomicAdd(to, x); }
  __device__ __forceinline__ void add(std::uint64_t* to, std::uint64_t x) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
  }
  __device__ __forceinline__ std::uint32_t take(std::uint32_t* counter) const { return atomicAdd(counter, 1u); }
  __device__ __forceinline__ void set_bits(std::uint32_t* word, std::uint32_t bits) const { atomicOr(word, bits); }
  template <Exp kExp>
  __device__ __forceinline__ float exponential(float z, float c, float m) const {
    if constexpr (kExp == Exp::kPortable) {
      return stat_exp_portable(z, c, sub_rn(kStatsShift, m));
    } else {
      return ex2_approx(fma_rn(z, c, -m));
    }
  }
  template <class P>
  __device__ __forceinline__ P* global(P* pointer) const {
    return pointer;
  }
  template <class N>
  __device__ __forceinline__ N own(N x) const {
    return x;
  }
};

// Bytes of shared memory of every kernel here.
constexpr int kSharedBytes = sizeof(SampleShared);
static_assert(kSharedBytes <= 48 * 1024);

template <class T, Exp kExp, bool kTruncate>
__global__ void __launch_bounds__(kRowThreads, 3)
    sample_select_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  RowSelection<BlockTeam<kRowThreads>, T, kExp> selection(
      BlockTeam<kRowThreads>(), p, chunk.first + i, reinterpret_cast<SampleShared*>(memory),
      chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i, chunk.firsts + i * kMaxTeam);
  kTruncate ? selection.run_truncate() : selection.run_first();
}

enum class TreePass { kTree, kDraw, kRaw };

// A row's draw needs one leaf: a warp has it.
template <TreePass kPass>
constexpr int kTreeThreads = kPass == TreePass::kDraw ? 32 : kRowThreads;

template <class T, Exp kExp, TreePass kPass>
__global__ void __launch_bounds__(kTreeThreads<kPass>, kPass == TreePass::kDraw ? 16 : 2)
    sample_tree_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Team = BlockTeam<kTreeThreads<kPass>>;
  const std::int64_t i = blockIdx.x;
  RowTree<Team, T, kExp> tree(Team(), p, chunk.first + i, reinterpret_cast<SampleShared*>(memory),
                              chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                              chunk.nodes + i * sample_node_floats(p.vocab_size));
  if constexpr (kPass == TreePass::kTree) {
    tree.run_tree();
  } else if constexpr (kPass == TreePass::kDraw) {
    tree.run_draw(p.kept_offsets == nullptr ? nullptr : p.kept_offsets + chunk.first + i + 1);
  } else {
    tree.run_raw();
  }
}

__global__ void __launch_bounds__(kRowThreads)
    sample_offsets_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  offsets_of_counts(BlockTeam<kRowThreads>(), p, chunk.first, chunk.rows, chunk.closed,
                    reinterpret_cast<SampleShared*>(memory));
}

__global__ void __launch_bounds__(kKeptThreads)
    sample_kept_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  write_kept_ids(BlockTeam<kKeptThreads>(), p, chunk.first + i, chunk.masks + i * sample_mask_words(p.vocab_size),
                 reinterpret_cast<SampleShared*>(memory));
}

template <class T, Exp kExp>
void run_rows(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(chunk.rows);
  sample_select_kernel<T, kExp, false><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's first ranks");
  const auto cuts = [](const RowFloats& x, float nothing) { return x.data != nullptr || x.value != nothing; };
  if (cuts(p.top_p, 1.0f) || cuts(p.min_p, 0.0f) || p.top_k.data != nullptr || p.top_k.value > 0) {
    sample_select_kernel<T, kExp, true><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
    check(cudaGetLastError(), "launch of sample's truncation");
  }
  sample_tree_kernel<T, kExp, TreePass::kTree><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's tree");
  sample_tree_kernel<T, kExp, TreePass::kDraw><<<blocks, kTreeThreads<TreePass::kDraw>, 0, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's draw");
  if (p.raw_logprob == nullptr) return;
  sample_tree_kernel<T, kExp, TreePass::kRaw><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's raw_logprob");
}
template <class T>
void run_rows(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  p.exp == Exp::kHardware ? run_rows<T, Exp::kHardware>(p, chunk, stream)
                          : run_rows<T, Exp::kPortable>(p, chunk, stream);
}

inline void run(const SampleParams& p, cudaStream_t stream) {
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    switch (p.dtype) {
      case DType::kFloat32:
        run_rows<Fp32>(p, chunk, stream);
        break;
      case DType::kBFloat16:
        run_rows<Bf16>(p, chunk, stream);
        break;
      default:
        run_rows<Fp16>(p, chunk, stream);
    }
    if (p.kept_offsets == nullptr) continue;
    sample_offsets_kernel<<<1, kRowThreads, kSharedBytes, stream>>>(p, chunk);
    check(cudaGetLastError(), "launch of sample's offsets");
    sample_kept_kernel<<<static_cast<unsigned>(chunk.rows), kKeptThreads, kSharedBytes, stream>>>(p, chunk);
    check(cudaGetLastError(), "launch of sample's kept ids");
  }
}

}  // namespace
}  // namespace rlk::cuda
