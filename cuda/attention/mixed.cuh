// The forward of attention for mixed batches: some sequences have many queries (prefill), and others have few (decode).
// One kernel computes tiles of queries for sequences with many queries. At the same time another kernel computes splits
// of the keys for sequences with few queries.
#pragma once

#include "forward.cuh"
#if RLK_CUDA_SM90
#include "forward_sm90.cuh"
#endif

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Computes the splits of sequences with few queries. `waits`: this kernel ends only after the previous kernel, since
// the merge that follows waits only for this kernel. `counter`: null, or the counter of tiles of the next kernel, which
// this kernel clears.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    attention_mixed_split_kernel(const __grid_constant__ MixedParams p, const __grid_constant__ SplitCall call,
                                 bool vectors, bool waits, std::uint32_t* counter) {
  extern __shared__ __align__(128) unsigned char memory[];
  if (counter != nullptr && blockIdx.x == 0) {
    if (threadIdx.x == 0) {
      atomicExch(counter, 0u);
      __threadfence();
    }
    __syncthreads();  // so the next kernel begins after the counter is clear
  }
  allow_next_kernel();
  SplitByCopies<T, Tile>(p, call, memory, vectors).run();
  if (waits && blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

// Merges the splits of sequences with few queries. Each warp merges one head, for one token or for all tokens of a
// sequence.
template <class T>
__global__ void __launch_bounds__(128)
    attention_mixed_merge_kernel(const __grid_constant__ MixedParams p, const __grid_constant__ SplitCall call,
                                 std::int64_t warps) {
  const std::int64_t warp = blockIdx.x * std::int64_t{4} + threadIdx.x / 32, unit = warp / p.num_q_heads;
  AttentionRange tokens = {0, 0};
  std::int64_t sequence = unit;
  if (warp < warps) {
    if (p.by_token) sequence = sequence_of(p.cu_seqlens_q, p.num_sequences, unit);
    if (sequence < p.num_sequences) tokens = attention_place(p.cu_seqlens_q, sequence, p.q_tokens);
  }
  wait_for_previous_kernel();  // also in warps without rows to merge, since the next kernel waits only for this kernel
  if (tokens.last - tokens.first > p.few || tokens.empty()) return;
  const AttentionSpan span(p, sequence);
  const std::int64_t first_result = p.by_token ? 0 : sequence * p.few - tokens.first, head = warp % p.num_q_heads;
  if (p.by_token) {
    if (unit < tokens.first) return;
    tokens = {unit, unit + 1};
  }
#pragma unroll 1
  for (std::int64_t token = tokens.first; token < tokens.last; ++token) {
    const std::int64_t i = token - span.q_first;
    const AttentionRange sees = i < span.num_queries ? span.keys_of(i) : AttentionRange{0, 0};
    merge_row<T>(p, call, sees, sequence, token, head, token * p.num_q_heads + head,
                 ((first_result + token) * p.num_q_heads + head) * call.splits);
  }
}

// Launches the kernels of a call one after the other. On sm_90 a kernel may begin while the previous kernel still runs.
template <class T, int kColumns, bool kOverlap>
class MixedLaunches {
 public:
  MixedLaunches(const AttentionParams& given, bool vectors, cudaStream_t stream)
      : grid_(given), vectors_(vectors), stream_(stream), p_{given, grid_.few, grid_.by_token} {
    auto* const results = static_cast<float*>(p_.workspace);
    splits_ = {static_cast<std::uint32_t>(grid_.slots),
               static_cast<std::uint32_t>(grid_.splits),
               static_cast<std::uint32_t>(grid_.splits),
               static_cast<std::uint32_t>(p_.num_kv_heads),
               static_cast<std::uint32_t>(p_.num_q_heads / p_.num_kv_heads),
               grid_.merges,
               results + grid_.rows_at,
               results + grid_.sums_at};
  }

  void run_by_mma() {
    using Tile = MmaTile<kColumns>;
    const AttentionGrid g = attention_query_grid(p_, Tile::kRows, vectors_);
    allow_shared_memory<attention_mma_kernel<T, Tile, MixedParams>>();
    attention_mma_kernel<T, Tile, MixedParams>
        <<<checked_blocks(attention_blocks(p_, g), "attention"), Tile::kThreads, Tile::kBytes, stream_>>>(p_, g);
    launch_splits(true, true, nullptr);
    launch_merge();
  }

#if RLK_CUDA_SM90
  // One block of threads of the wgmma kernel fills a multiprocessor, and so do three blocks of threads of the splits'
  // kernel. The first launch of wgmma leaves some multiprocessors to the splits, which read memory while wgmma
  // multiplies. The second launch of wgmma begins once all splits have begun, and processes the remaining tiles.
  template <class Tile, Exp kExp>
  void run_by_wgmma() {
    constexpr bool kHasTotals = Tile::kOuterFours > 0;
    const int present = multiprocessors(current_device()), all = kHasTotals ? std::min(present, kOuterTotals) : present;
    const int part = std::max(all * 5 / 8, 1);
    // The number of tiles in a typical batch: one sequence has many queries, and all others have one query.
    const std::int64_t likely =
        (std::max(p_.q_tokens - p_.num_sequences, std::int64_t{1}) + 127) / 128 * p_.num_q_heads;
    WgmmaMixedCall call;
    static_cast<WgmmaCall&>(call) = wgmma_call<Tile>(static_cast<const AttentionParams&>(p_));
    call.first_block = 0;
    call.done = nullptr;
    call.waits = false;
    auto* const totals = reinterpret_cast<float4*>(static_cast<float*>(p_.workspace) + grid_.totals_at);
    if (kHasTotals) call.totals = totals;
    auto* const counters = static_cast<std::uint32_t*>(p_.workspace);
    if (grid_.is_decode || likely <= all) {  // most tiles run at once, without a counter
      call.all_blocks = static_cast<int>(std::min<std::int64_t>(likely, grid_.is_decode ? part : all));
      launch_tiles<Tile, kExp, false>(call, call.all_blocks);
      launch_splits(true, true, nullptr);
    } else if (grid_.blocks <= 3 * std::int64_t{all} || part == all) {  // all splits run at once and end soon
      call.counter = counters;
      call.all_blocks = all;
      call.waits = true;
      launch_splits(false, false, counters);
      launch_tiles<Tile, kExp, true>(call, all);
    } else {
      check(cudaMemsetAsync(counters, 0, 8, stream_), "attention's counters");
      call.counter = counters;
      call.all_blocks = all;
      call.done = counters + 1;
      launch_tiles<Tile, kExp, false>(call, part);
      launch_splits(true, false, nullptr);
      call.first_block = part;
      if (kHasTotals) call.totals = totals + std::int64_t{part} * (Tile::kOuterFours * 256);
      call.waits = true;
      launch_tiles<Tile, kExp, true>(call, all - part);
    }
    launch_merge();
  }
#endif

 private:
  void launch_splits(bool beside, bool waits, std::uint32_t* counter) {
    using Tile = SplitTile<kColumns, false, true>;
    allow_shared_memory<attention_mixed_split_kernel<T, Tile>>();
    const auto launch = [&](auto overlaps) {
      launch_dependent<decltype(overlaps)::value>(
          attention_mixed_split_kernel<T, Tile>, static_cast<int>(checked_blocks(grid_.blocks, "attention")),
          Tile::kThreads, Tile::kBytes, stream_, p_, splits_, vectors_, waits, counter);
    };
    beside ? launch(std::bool_constant<kOverlap>()) : launch(std::false_type());
  }
#if RLK_CUDA_SM90
  template <class Tile, Exp kExp, bool kBeside>
  void launch_tiles(const WgmmaMixedCall& call, int blocks) {
    allow_shared_memory<attention_wgmma_kernel<T, Tile, kExp, MixedParams>>();
    launch_dependent<kBeside>(attention_wgmma_kernel<T, Tile, kExp, MixedParams>, blocks, Tile::kThreads, Tile::kBytes,
                              stream_, p_, call);
  }
#endif
  void launch_merge() {
    if (!grid_.merges) return;
    const std::int64_t warps = (grid_.by_token ? p_.q_tokens : p_.num_sequences) * p_.num_q_heads;
    launch_dependent<kOverlap>(attention_mixed_merge_kernel<T>,
                               static_cast<int>(checked_blocks((warps + 3) / 4, "attention")), 128, 0, stream_, p_,
                               splits_, warps);
  }

  const MixedGrid grid_;
  const bool vectors_;
  const cudaStream_t stream_;
  MixedParams p_;
  SplitCall splits_;
};

#if RLK_CUDA_SM90
template <class T, int kColumns, class Tile>
void run_mixed_by_wgmma(const AttentionParams& p, bool vectors, cudaStream_t stream) {
  MixedLaunches<T, kColumns, true> launches(p, vectors, stream);
  p.exp == Exp::kHardware ? launches.template run_by_wgmma<Tile, Exp::kHardware>()
                          : launches.template run_by_wgmma<Tile, Exp::kPortable>();
}
#endif

}  // namespace
}  // namespace rlk::cuda
