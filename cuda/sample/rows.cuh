// Rows of sample: a block has a row, or a part of a row's tree, and eight threads have a leaf. Then one block computes
// the offsets of the kept sets, and a block for each row writes their ids. The formulas stand in
// rlk/kernels/sample_select.h and sample_tree.h, shared with the CPU and HIP. Bound by reads of the logits: one without
// truncation, two if top-k leaves few columns, up to six for a large top-p set. One body serves every architecture, and
// each has its own machine code.
#pragma once

#include "rlk/kernels/sample_kept.h"
#include "rlk/kernels/sample_top.h"
#include "rlk/kernels/sample_tree.h"
#include "team.cuh"
#if RLK_CUDA_SM90
#include "row_clusters_sm90.cuh"
#endif

namespace rlk::cuda {
namespace {  // one copy per architecture

// Bytes of shared memory of every kernel in this file.
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

// The tree of the kept columns in parts, its draw, the raw tree in parts, and its log-probability. Shards (shards.cuh)
// have no kRawTree: kRaw is all of it.
enum class TreePass { kTree, kDraw, kRawTree, kRaw };

// A row's draw needs one leaf, which one warp computes.
template <TreePass kPass>
constexpr int kTreeThreads = kPass == TreePass::kDraw ? 32 : kRowThreads;

template <class T, Exp kExp, TreePass kPass>
__global__ void __launch_bounds__(kTreeThreads<kPass>, kPass == TreePass::kDraw ? 16 : 2)
    sample_tree_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Team = BlockTeam<kTreeThreads<kPass>>;
  constexpr bool kInParts = kPass == TreePass::kTree || kPass == TreePass::kRawTree;
  const std::int64_t i = kInParts ? blockIdx.x / kNumParts : blockIdx.x;
  const int part = static_cast<int>(blockIdx.x % kNumParts);  // neighbouring blocks read neighbouring columns
  RowTree<Team, T, kExp> tree(Team(), p, chunk.first + i, reinterpret_cast<SampleShared*>(memory),
                              chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i,
                              chunk.nodes + i * sample_node_floats(p.vocab_size));
  if constexpr (kPass == TreePass::kTree) {
    tree.run_part(part);
  } else if constexpr (kPass == TreePass::kRawTree) {
    tree.run_raw_part(part);
  } else if constexpr (kPass == TreePass::kDraw) {
    tree.run_join();
    tree.run_draw(p.kept_offsets == nullptr ? nullptr : p.kept_offsets + chunk.first + i + 1);
  } else {
    tree.template run_raw<true>();
  }
}

template <class T, bool kRaw>
__global__ void __launch_bounds__(kRowThreads, 3)
    sample_top_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SampleChunk chunk) {
  extern __shared__ __align__(16) unsigned char memory[];
  const std::int64_t i = blockIdx.x;
  RowTop<BlockTeam<kRowThreads>, T, kRaw>(
      BlockTeam<kRowThreads>(), p, chunk.first + i, reinterpret_cast<SampleShared*>(memory),
      chunk.masks + i * sample_mask_words(p.vocab_size), chunk.states + i, chunk.firsts + i * kMaxTeam,
      chunk.nodes + i * sample_node_floats(p.vocab_size))
      .run();
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

template <class T, bool kRaw>
void run_top(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  if (p.top_ids == nullptr) return;
  sample_top_kernel<T, kRaw><<<static_cast<unsigned>(chunk.rows), kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's n best");
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
  sample_tree_kernel<T, kExp, TreePass::kTree><<<blocks * kNumParts, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's tree");
  sample_tree_kernel<T, kExp, TreePass::kDraw><<<blocks, kTreeThreads<TreePass::kDraw>, 0, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's draw");
  run_top<T, false>(p, chunk, stream);
}
template <class T, Exp kExp>
void run_raw(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(chunk.rows);
  sample_tree_kernel<T, kExp, TreePass::kRawTree><<<blocks * kNumParts, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's raw tree");
  sample_tree_kernel<T, kExp, TreePass::kRaw><<<blocks, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's raw_logprob");
  run_top<T, true>(p, chunk, stream);
}
// Calls fn<T, kExp>() for the params' type and exponential.
template <class F>
void by_type_and_mode(const SampleParams& p, F fn) {
  const auto by_mode = [&](auto type) {
    p.exp == Exp::kHardware ? fn.template operator()<decltype(type), Exp::kHardware>()
                            : fn.template operator()<decltype(type), Exp::kPortable>();
  };
  p.dtype == DType::kFloat32 ? by_mode(Fp32()) : p.dtype == DType::kBFloat16 ? by_mode(Bf16()) : by_mode(Fp16());
}

// Writes the kept sets of rows, which earlier launches have marked and counted.
inline void run_kept(const SampleParams& p, const SampleChunk& chunk, cudaStream_t stream) {
  if (p.kept_offsets == nullptr) return;
  sample_offsets_kernel<<<1, kRowThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's offsets");
  sample_kept_kernel<<<static_cast<unsigned>(chunk.rows), kKeptThreads, kSharedBytes, stream>>>(p, chunk);
  check(cudaGetLastError(), "launch of sample's kept ids");
}

inline void run(const SampleParams& p, cudaStream_t stream) {
  const SampleParams of_raw = raw_pass(p);
  for (std::int64_t first = 0; first < p.num_rows; first += kSampleChunk) {
    const SampleChunk chunk = sample_chunk(p, first, p.workspace);
    bool clusters = false, takes_raw = p.raw_logprob != nullptr;
#if RLK_CUDA_SM90
    clusters = takes_clusters(p);
    if (clusters) {
      const bool of_logits = takes_raw && p.raw_logits == nullptr;
      by_type_and_mode(p, [&]<class T, Exp kExp>() { run_clusters<T, kExp>(p, chunk, of_logits, stream); });
      takes_raw = takes_raw && !of_logits;
    }
#endif
    if (!clusters) by_type_and_mode(p, [&]<class T, Exp kExp>() { run_rows<T, kExp>(p, chunk, stream); });
    if (takes_raw) {
      by_type_and_mode(of_raw, [&]<class T, Exp kExp>() { run_raw<T, kExp>(of_raw, chunk, stream); });
    }
    run_kept(p, chunk, stream);
  }
}

}  // namespace
}  // namespace rlk::cuda
