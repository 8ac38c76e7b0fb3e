// Passes over tokens: the kernels of kernels/tokens/passes.h on CUDA. On compute capability 9.0 and later, each kernel
// is launched while the previous kernel runs, and waits for the previous kernel's results. All architectures share this
// source; each has its own machine code.
#pragma once

#include "../common/cluster_sm90.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/fetch_increment.cuh"
#include "counts.cuh"
#include "gpu.cuh"
#include "kernels/tokens/passes.h"
#include "plan.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

template <class Batch>
__global__ void __launch_bounds__(kTokenThreads, 2)
    token_statistics_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w,
                            std::int64_t slots, int tile) {
  __shared__ WaveResults shared;
  wait_for_previous_kernel();
  token_statistics<FirstPassGpu>(p, w, slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

template <class Batch>
__global__ void __launch_bounds__(kGatherThreads, 1)
    token_sequences_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w, int tile,
                           int lanes) {
  __shared__ GatheredSums shared;
  wait_for_previous_kernel();
  token_sequences<TokenGpu>(p, w, tile, lanes, blockIdx.x, &shared);
  allow_next_kernel();
}

// Terms: one type for each group of sums that the pass computes.
template <class Batch, int kLeastBlocks, class... Terms>
__global__ void __launch_bounds__(kTokenThreads, kLeastBlocks)
    token_terms_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w,
                       std::int64_t slots, int tile) {
  __shared__ WaveResults shared;
  allow_next_kernel();  // each kernel waits for the whole previous kernel
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *w.finished = 0;
  token_terms<TokenGpu, Batch, Terms...>(p, w, slots, tile, blockIdx.x, &shared);
}

// Whether this block is the last block of its launch to call this function. All threads of the last block see what all
// other blocks wrote before.
__device__ __forceinline__ bool is_last_block(std::uint32_t* finished, bool* shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared = fetch_increment(finished) + 1 == gridDim.x;
  __syncthreads();
  __threadfence();
  return *shared;
}

template <class Batch>
__global__ void __launch_bounds__(kGatherThreads, 1)
    batch_sums_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w, int tile,
                      int lanes) {
  __shared__ struct {
    BatchSumsShared<Batch> of;
    bool is_last;
  } shared;
  allow_next_kernel();
  wait_for_previous_kernel();
  batch_sums<TokenGpu>(p, w, tile, lanes, gridDim.x, blockIdx.x, &shared.of);
  if (gridDim.x > 1 && is_last_block(w.finished, &shared.is_last)) {
    batch_results<TokenGpu>(p, w, static_cast<int>(gridDim.x), &shared.of.totals);
  }
}

template <class Batch>
__global__ void __launch_bounds__(kTokenThreads, 2)
    few_sums_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w, int tile) {
  __shared__ FewShared<Batch> shared;
  allow_next_kernel();
  wait_for_previous_kernel();
  asm volatile("prefetch.global.L1 [%0];" ::"l"(w.shared));  // needed after the sums of sequences
  few_sums<TokenGpu>(p, w, tile, &shared);
}

// On compute capability 9.0 and later, a cluster sums a batch with too many sequences for one block. Each block sums
// `each` sequences, a power of two. The first block computes the results from all blocks' totals. An exchange of totals
// through shared memory takes a fraction of the time of an exchange through global memory. But the launch of a cluster
// takes longer than the launch of a single block.
constexpr int kMostFewBlocks = 8, kLeastOfFewBlock = 32;
template <class Batch>
__global__ void __launch_bounds__(kTokenThreads, 1)
    few_clusters_kernel(const __grid_constant__ typename Batch::Params p, const TokenWorkspace<Batch> w, int tile,
                        int each) {
  __shared__ FewShared<Batch> shared;
  __shared__ TotalsOf<Batch> of_blocks[kMostFewBlocks];
  TotalsOf<Batch>& total = shared.totals.total;
  allow_next_kernel();
  cluster_arrive();  // a block writes to another block only after that block has started
  wait_for_previous_kernel();
  few_totals<TokenGpu>(p, w, tile, std::int64_t{blockIdx.x} * each, each, &shared);
  cluster_wait();
  const std::uint32_t to = map_to_rank(static_cast<std::uint32_t>(__cvta_generic_to_shared(&of_blocks[blockIdx.x])), 0);
  static_assert(sizeof(TotalsOf<Batch>) % 4 == 0);
  for (unsigned i = threadIdx.x; i < sizeof(TotalsOf<Batch>) / 4; i += kTokenThreads) {
    store_remote(to + i * 4, reinterpret_cast<const std::uint32_t*>(&total)[i]);
  }
  cluster_arrive();
  cluster_wait();
  if (blockIdx.x > 0) return;
  const auto blocks = static_cast<int>(gridDim.x), i = static_cast<int>(threadIdx.x);
  if (i < Batch::kSums) {
    float x[kMostFewBlocks];
#pragma unroll
    for (int b = 0; b < kMostFewBlocks; ++b) x[b] = b < blocks ? of_blocks[b].sum[i] : 0.0f;
#pragma unroll
    for (int distance = 1; distance < kMostFewBlocks; distance *= 2) {
#pragma unroll
      for (int b = 0; b < kMostFewBlocks; b += 2 * distance) x[b] = __fadd_rn(x[b], x[b + distance]);
    }
    total.sum[i] = x[0];
  }
  if (i < Batch::kCounts) {
    std::int64_t count = 0;
    for (int b = 0; b < blocks; ++b) count += of_blocks[b].count[i];
    total.count[i] = count;
  }
  if (i < Batch::kMaxima) {
    float most = of_blocks[0].maximum[i];
    for (int b = 1; b < blocks; ++b) most = maximum_of(most, of_blocks[b].maximum[i]);
    total.maximum[i] = most;
  }
  __syncthreads();
  store_results<TokenGpu>(p, w, shared.totals);
}

template <class Batch>
using TermsKernel = void (*)(typename Batch::Params, TokenWorkspace<Batch>, std::int64_t, int);
// The pass over tokens, with its dynamic shared memory. `weigh`, if given, is a kernel of `weigh_blocks` blocks that
// runs after the pass. This kernel multiplies the pass's outputs by their weights and computes the sums. No statistics
// are then computed before the pass.
template <class Batch>
struct TermsLaunch {
  using Weigh = void (*)(typename Batch::Params, TokenWorkspace<Batch>, int);
  TermsLaunch(TermsKernel<Batch> launched, int bytes = 0, Weigh weighs = nullptr, int blocks = 0)
      : kernel(launched), shared_bytes(bytes), weigh(weighs), weigh_blocks(blocks) {}
  TermsKernel<Batch> kernel;
  int shared_bytes;
  Weigh weigh;
  int weigh_blocks;
};

inline TokenPasses token_passes(const Sequences& q, const TokenPlan& plan) {
  const TokenPasses passes(q, plan.tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  RLK_CHECK(passes.token_blocks < std::int64_t{1} << 31, "too many tokens for one launch");
  RLK_CHECK(passes.sequence_blocks < std::int64_t{1} << 31, "too many sequences for one launch");
  return passes;
}

// The kernels of one call, in order.
template <bool kOverlap, class Batch>
class TokenLaunches {
 public:
  TokenLaunches(const typename Batch::Params& p, const TokenPlan& plan, cudaStream_t stream)
      : p_(p),
        tile_(plan.tile),
        stream_(stream),
        passes_(token_passes(Batch::sequences(p), plan)),
        w_(Batch::sequences(p), plan.tile, p.workspace) {}

  template <class... Args>
  void launch(void (*kernel)(typename Batch::Params, TokenWorkspace<Batch>, Args...), std::int64_t blocks, int threads,
              const Args&... args) {
    const int count = static_cast<int>(blocks);
    launch_dependent<kOverlap>(kernel, count, threads, 0, stream_, p_, w_, args...);
  }

  void run(const TermsLaunch<Batch>& terms) {
    const auto [slots, token_blocks, sequence_blocks, lanes] = passes_;
    if (terms.weigh != nullptr) {
      run_terms(terms);
      return launch(terms.weigh, terms.weigh_blocks, kTokenThreads, tile_);
    }
    if constexpr (kHasStatistics<Batch>) {
      if (Batch::needs_pass_before(p_)) {
        launch(Batch::counts_alone(p_) ? token_counts_kernel<Batch> : token_statistics_kernel<Batch>,
               token_blocks > 0 ? token_blocks : 1, kTokenThreads, slots, tile_);
        launch(token_sequences_kernel<Batch>, sequence_blocks, kGatherThreads, tile_, lanes);
      }
    }
    const bool sums = Batch::needs_sums(p_);
    if (token_blocks > 0 || sums) run_terms(terms);
    if (!sums) return;
    const Sequences& q = Batch::sequences(p_);
    if (are_few(q, tile_)) {
      launch(few_sums_kernel<Batch>, 1, kTokenThreads, tile_);
    } else if (kOverlap && are_few(q, tile_, kMostFewBlocks * kFewSequences)) {
      if constexpr (kOverlap) {
        int each = kLeastOfFewBlock;
        while (each * kMostFewBlocks < q.num_sequences) each *= 2;
        const auto blocks = static_cast<int>((q.num_sequences + each - 1) / each);
        launch_dependent_clusters<true>(few_clusters_kernel<Batch>, blocks, blocks, kTokenThreads, 0, stream_, p_, w_,
                                        tile_, each);
      }
    } else {
      launch(batch_sums_kernel<Batch>, sequence_blocks, kGatherThreads, tile_, lanes);
    }
  }
  void run_terms(const TermsLaunch<Batch>& terms) {
    const std::int64_t blocks = passes_.token_blocks > 0 ? passes_.token_blocks : 1;
    launch_dependent<kOverlap>(terms.kernel, static_cast<int>(blocks), kTokenThreads, terms.shared_bytes, stream_, p_,
                               w_, passes_.slots, tile_);
  }

 private:
  const typename Batch::Params& p_;
  int tile_;
  cudaStream_t stream_;
  TokenPasses passes_;
  TokenWorkspace<Batch> w_;
};

template <bool kOverlap, class Batch>
void run_token_passes(const typename Batch::Params& p, const TokenPlan& plan, const TermsLaunch<Batch>& terms,
                      cudaStream_t stream) {
  TokenLaunches<kOverlap, Batch>(p, plan, stream).run(terms);
}

}  // namespace
}  // namespace rlk::cuda
