// The forward of attention for sequences with few queries: the two launches of a call. The first launch computes the
// sums m, l and O of each split of the keys. The second launch merges the splits of each row.
#pragma once

#include <algorithm>

#include "../../common/dependent_launch.cuh"
#include "rows.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Merges the splits of a row (a query of one head) by one warp, in mixed batches. `sees` is the range of keys that no
// mask hides from the row, and `row` is the row's index in `out`. `at` is the index of the sums of the row's split 0.
template <class T, int kColumns = kMaxHeadDim>
__device__ __forceinline__ void merge_row(const AttentionParams& p, const SplitCall& call, const AttentionRange& sees,
                                          std::int64_t sequence, std::int64_t token, std::int64_t head,
                                          std::int64_t row, std::int64_t at) {
  const bool used = !sees.empty();
  // The loads of eight splits are in flight at once. If each split were loaded only after the merge of the previous
  // split, the warp would wait for L2 once per split.
  constexpr int kAtOnce = 8, kVec4s = kColumns / 128;
  const int lane = threadIdx.x % 32;
  float m = -infinity(), l = 0.0f, o[kVec4s][4] = {};
  const int last = used ? static_cast<int>(attention_splits(sees.last)) : 0;
  const int first = used ? static_cast<int>(attention_splits(sees.first + 1)) - 1 : 0;
#pragma unroll 1
  for (int begin = first; begin < last; begin += kAtOnce) {
    float2 of_split[kAtOnce];
    float4 sums[kAtOnce][kVec4s];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (begin + s >= last) break;
      of_split[s] = __ldcg(reinterpret_cast<const float2*>(call.rows) + at + begin + s);
#pragma unroll
      for (int i = 0; i < kVec4s; ++i) {
        const int column = (lane + 32 * i) * 4;
        if (column < p.value_dim) {
          sums[s][i] = __ldcg(reinterpret_cast<const float4*>(call.sums + (at + begin + s) * p.value_dim + column));
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (begin + s >= last) break;
      const AttentionMerge merge(m, of_split[s].x);
#pragma unroll
      for (int i = 0; i < kVec4s; ++i) {
        o[i][0] = merge(o[i][0], sums[s][i].x);
        o[i][1] = merge(o[i][1], sums[s][i].y);
        o[i][2] = merge(o[i][2], sums[s][i].z);
        o[i][3] = merge(o[i][3], sums[s][i].w);
      }
      l = merge(l, of_split[s].y);
      m = merge.m;
    }
  }
  if (used && p.sinks != nullptr) {
    const AttentionMerge merge = attention_sink<AttentionGpu>(p, head).into(&m, &l);
#pragma unroll
    for (int i = 0; i < kVec4s; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] = merge(o[i][j], 0.0f);
    }
  }
  const bool fails = attention_fails(m, used);
  const float inverse = fails ? canonical_nan() : div_rn(1.0f, used ? l : 1.0f);
  auto* to = static_cast<typename T::Storage*>(p.out) + row * p.value_dim;
#pragma unroll
  for (int i = 0; i < kVec4s; ++i) {
    const int column = (lane + 32 * i) * 4;
    if (column >= p.value_dim) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) to[column + j] = T::store(used ? attention_output(o[i][j], inverse) : 0.0f);
  }
  if (lane == 0 && p.lse != nullptr) {
    p.lse[lse_index(p, sequence, token, head)] = fails ? canonical_nan() : used ? attention_lse(m, l) : -infinity();
  }
}

// Merges a row's splits by a block of 128 threads, for calls with few rows. A thread has every 128th column, so the
// loads of many splits can be in flight. Each lane computes the merge factors of one split. They depend on the largest
// reference m of all earlier splits, which is a prefix maximum over lanes.
template <class T, int kColumns>
__device__ __forceinline__ void merge_row_by_block(const AttentionParams& p, const SplitCall& call,
                                                   const AttentionRange& sees, std::int64_t sequence,
                                                   std::int64_t token, std::int64_t head, std::int64_t row,
                                                   std::int64_t at) {
  const bool used = !sees.empty();
  constexpr int kShare = kColumns / 128, kAtOnce = 24 / kShare;  // this many splits are loaded at once
  const int lane = threadIdx.x % 32, column = threadIdx.x;
  float m = -infinity(), l = 0.0f, o[kShare] = {};
  const int last = used ? static_cast<int>(attention_splits(sees.last)) : 0;
  const int first = used ? static_cast<int>(attention_splits(sees.first + 1)) - 1 : 0;
#pragma unroll 1
  for (int begin = first; begin < last; begin += kAtOnce) {
    const int count = min(last - begin, kAtOnce);
    const float* from = call.sums + (at + begin) * p.value_dim + column;
    float2 of_lane = {-infinity(), 0.0f};
    if (lane < count) of_lane = __ldcg(reinterpret_cast<const float2*>(call.rows) + at + begin + lane);
    float sums[kAtOnce][kShare];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (s >= count) break;
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        if (column + 128 * i < p.value_dim) sums[s][i] = __ldcg(from + 128 * i);
      }
      from += p.value_dim;
    }
    float before = of_lane.x;
#pragma unroll
    for (int distance = 1; distance < kAtOnce; distance *= 2) {
      const float other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before = max_nan(before, other);
    }
    before = __shfl_up_sync(~0u, before, 1);
    before = lane == 0 ? m : max_nan(m, before);
    const AttentionMerge of_split(before, of_lane.x);
    const unsigned only_split = __ballot_sync(~0u, of_split.only_split);
    const unsigned only_before = __ballot_sync(~0u, of_split.only_before);
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (s >= count) break;
      AttentionMerge merge = of_split;
      merge.only_split = only_split >> s & 1;
      merge.only_before = only_before >> s & 1;
      merge.factor = __shfl_sync(~0u, of_split.factor, s);
      merge.factor_of_split = __shfl_sync(~0u, of_split.factor_of_split, s);
#pragma unroll
      for (int i = 0; i < kShare; ++i) o[i] = merge(o[i], sums[s][i]);
      l = merge(l, __shfl_sync(~0u, of_lane.y, s));
    }
    m = __shfl_sync(~0u, of_split.m, count - 1);
  }
  if (used && p.sinks != nullptr) {
    const AttentionMerge merge = attention_sink<AttentionGpu>(p, head).into(&m, &l);
#pragma unroll
    for (float& sum : o) sum = merge(sum, 0.0f);
  }
  const bool fails = attention_fails(m, used);
  const float inverse = fails ? canonical_nan() : div_rn(1.0f, used ? l : 1.0f);
  auto* to = static_cast<typename T::Storage*>(p.out) + row * p.value_dim + column;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    if (column + 128 * i < p.value_dim) to[128 * i] = T::store(used ? attention_output(o[i], inverse) : 0.0f);
  }
  if (column == 0 && p.lse != nullptr) {
    p.lse[lse_index(p, sequence, token, head)] = fails ? canonical_nan() : used ? attention_lse(m, l) : -infinity();
  }
}

// A token of q whose rows are to be merged: its sequence, and the range [first, last) of splits that its rows see. All
// heads of a token see the same keys.
struct MergedToken {
  int sequence, token;  // as in AttentionQuery
  int first = 0, last = 0;

  // `place`: the token's index in q, counted over all sequences.
  __device__ __forceinline__ MergedToken(const AttentionParams& p, int place) : sequence(place), token(0) {
    if (p.cu_seqlens_q != nullptr) {
      token = place;
      // If each sequence has one query, the token's sequence has the token's number, and a bisection is not needed.
      const bool is_guess_right =
          place < p.num_sequences && p.cu_seqlens_q[place] <= place && p.cu_seqlens_q[place + 1] > place;
      if (!is_guess_right) sequence = static_cast<int>(sequence_of(p.cu_seqlens_q, p.num_sequences, place));
      if (sequence >= p.num_sequences || p.cu_seqlens_q[sequence] > token) return;
    } else if (p.q_tokens > 1) {
      const auto of_sequence = static_cast<int>(p.q_tokens);
      sequence = place / of_sequence;
      token = place % of_sequence;
    }
    const AttentionSpan span(p, sequence);
    const std::int64_t i = token - span.q_first;
    const AttentionRange sees = i < span.num_queries ? span.keys_of(i) : AttentionRange{0, 0};
    if (sees.empty()) return;
    last = static_cast<int>(attention_splits(sees.last));
    first = static_cast<int>(attention_splits(sees.first + 1)) - 1;
  }
  __device__ __forceinline__ bool used() const { return first < last; }
};

// How a warp shares the columns of its rows. With at most 64 columns, a warp merges two rows at a time.
template <int kColumns>
struct MergeLanes {
  static constexpr int kLanes = kColumns <= 64 ? 16 : 32, kRows = 32 / kLanes;  // lanes per row, rows at a time
  static constexpr int kVec4s = kColumns / kLanes / 4;                          // groups of four columns per lane
  // The loads of this many splits are in flight at once. If each split were loaded only after the merge of the previous
  // split, the warp would wait for L2 once per split.
  static constexpr int kAtOnce = kColumns <= 128 ? 10 : 4;
  static constexpr int kBlocks = 6;  // blocks of 128 threads per multiprocessor
};

// Merges the rows of up to 32 heads of a token by one warp: heads [head, head + count).
template <class T, int kColumns>
class MergeHeads {
 public:
  __device__ __forceinline__ MergeHeads(const AttentionParams& p, const SplitCall& call, const MergedToken& token,
                                        std::int64_t place, int head, int count)
      : p_(p), call_(call), token_(token), first_row_(place * p.num_q_heads + head), head_(head), count_(count) {
#pragma unroll
    for (int i = 0; i < kVec4s; ++i) columns_[i] = column(i) < p.value_dim ? column(i) : 0;
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int i = 0; i < count_; i += Lanes::kRows) {
      // The last lanes may have no row. They repeat the row of the first lanes, with the same results.
      const int of_row = i + sub() < count_ ? i + sub() : i;
      float m = -infinity(), l = 0.0f, o[kVec4s][4] = {};
#pragma unroll 1
      for (int begin = token_.first; begin < token_.last; begin += kAtOnce) {
        add((first_row_ + of_row) * call_.splits + begin, min(token_.last - begin, kAtOnce), &m, &l, o);
      }
      finish(of_row, &m, &l, o);
#pragma unroll
      for (int r = 0; r < Lanes::kRows; ++r) {
        const float m_of_row = __shfl_sync(~0u, m, r * kLanes), l_of_row = __shfl_sync(~0u, l, r * kLanes);
        if (static_cast<int>(threadIdx.x % 32) != i + r) continue;
        m_ = m_of_row;
        l_ = l_of_row;
      }
    }
    put_lse();
  }

 private:
  using Lanes = MergeLanes<kColumns>;
  static constexpr int kLanes = Lanes::kLanes, kVec4s = Lanes::kVec4s, kAtOnce = Lanes::kAtOnce;

  // The lane's number among the lanes of its row, and the number of this row among the rows that are merged together.
  __device__ __forceinline__ int lane() const { return threadIdx.x % kLanes; }
  __device__ __forceinline__ int sub() const { return threadIdx.x % 32 / kLanes; }
  __device__ __forceinline__ int column(int i) const { return (lane() + kLanes * i) * 4; }

  // Merges `count` splits of a row, whose sums have the indices from `at` on. Each lane computes the merge factors of
  // one split. They depend on the largest reference m of all earlier splits, which is a prefix maximum over lanes.
  __device__ __forceinline__ void add(std::int64_t at, int count, float* m, float* l, float (&o)[kVec4s][4]) const {
    float2 of_lane = {-infinity(), 0.0f};
    if (lane() < count) of_lane = __ldcg(reinterpret_cast<const float2*>(call_.rows) + at + lane());
    const float* from = call_.sums + at * p_.value_dim;
    // Lanes without columns load the first columns, so that no load needs a branch.
    float4 sums[kAtOnce][kVec4s];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (s >= count) break;
#pragma unroll
      for (int i = 0; i < kVec4s; ++i) sums[s][i] = __ldcg(reinterpret_cast<const float4*>(from + columns_[i]));
      from += p_.value_dim;
    }
    float before = of_lane.x;
#pragma unroll
    for (int distance = 1; distance < kAtOnce; distance *= 2) {
      const float other = __shfl_up_sync(~0u, before, distance, kLanes);
      if (lane() >= distance) before = max_nan(before, other);
    }
    before = __shfl_up_sync(~0u, before, 1, kLanes);
    before = lane() == 0 ? *m : max_nan(*m, before);
    const AttentionMerge merge(before, of_lane.x);
    // Splits with m = -Inf contribute nothing, and are left out. The sums before the first other split are 0, and its
    // factors are 1, so it is taken unchanged, except for the sign of a zero. No result depends on this sign.
    const unsigned contribute = __ballot_sync(~0u, of_lane.x != -infinity()) >> sub() * kLanes;
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (s >= count) break;
      const float factor = __shfl_sync(~0u, merge.factor, s, kLanes);
      const float factor_of_split = __shfl_sync(~0u, merge.factor_of_split, s, kLanes);
      const float l_of_split = __shfl_sync(~0u, of_lane.y, s, kLanes);
      if ((contribute >> s & 1) == 0) continue;
#pragma unroll
      for (int i = 0; i < kVec4s; ++i) {
        o[i][0] = fma_rn(o[i][0], factor, mul_rn(sums[s][i].x, factor_of_split));
        o[i][1] = fma_rn(o[i][1], factor, mul_rn(sums[s][i].y, factor_of_split));
        o[i][2] = fma_rn(o[i][2], factor, mul_rn(sums[s][i].z, factor_of_split));
        o[i][3] = fma_rn(o[i][3], factor, mul_rn(sums[s][i].w, factor_of_split));
      }
      *l = fma_rn(*l, factor, mul_rn(l_of_split, factor_of_split));
    }
    *m = __shfl_sync(~0u, merge.m, count - 1, kLanes);
  }
  // Merges the row's sink, if any, and stores the row's output.
  __device__ __forceinline__ void finish(int of_row, float* m, float* l, float (&o)[kVec4s][4]) const {
    const bool used = token_.used();
    if (used && p_.sinks != nullptr) {
      const AttentionMerge merge = attention_sink<AttentionGpu>(p_, head_ + of_row).into(m, l);
#pragma unroll
      for (auto& four : o) {
#pragma unroll
        for (float& sum : four) sum = merge(sum, 0.0f);
      }
    }
    const bool fails = attention_fails(*m, used);
    const float inverse = fails ? canonical_nan() : used ? div_rn(1.0f, *l) : 0.0f;
    const bool vectors = reinterpret_cast<std::uintptr_t>(p_.out) % 8 == 0;
    auto* to = static_cast<typename T::Storage*>(p_.out) + (first_row_ + of_row) * p_.value_dim;
#pragma unroll
    for (int i = 0; i < kVec4s; ++i) {
      if (column(i) >= p_.value_dim) continue;
      float out[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = attention_output(o[i][j], inverse);
      if (vectors) {
        *reinterpret_cast<uint2*>(to + column(i)) = make_uint2(T::pack(out[0], out[1]), T::pack(out[2], out[3]));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[column(i) + j] = T::store(out[j]);
      }
    }
  }
  // Stores the lse of all rows, one row per lane.
  __device__ __forceinline__ void put_lse() const {
    const int of_row = threadIdx.x % 32;
    if (p_.lse == nullptr || of_row >= count_) return;
    float lse = -infinity();
    if (token_.used()) lse = attention_fails(m_, true) ? canonical_nan() : attention_lse(m_, l_);
    p_.lse[lse_index(p_, token_.sequence, token_.token, head_ + of_row)] = lse;
  }

  const AttentionParams& p_;
  const SplitCall& call_;
  const MergedToken& token_;
  const std::int64_t first_row_;
  const int head_, count_;
  int columns_[kVec4s];
  float m_ = -infinity(), l_ = 0.0f;  // m and l of row threadIdx.x % 32, once it is merged
};

// The grid of a merge by warps. A warp merges up to `heads` heads of one token, and finds the token's sequence once.
struct MergeGrid {
  unsigned heads, warps, parts;  // warps: warps per block of threads; parts: blocks of threads per token

  MergeGrid(std::int64_t rows, std::int64_t num_q_heads) {
    // About this number of warps run at once on 132 multiprocessors, and larger calls have more heads per warp.
    constexpr std::int64_t kWarps = 3072, kMostHeads = 8;
    const std::int64_t most = std::clamp<std::int64_t>((rows + kWarps - 1) / kWarps, 1, kMostHeads);
    const std::int64_t warps_of_token = (num_q_heads + most - 1) / most;
    heads = static_cast<unsigned>((num_q_heads + warps_of_token - 1) / warps_of_token);
    warps = static_cast<unsigned>(std::min<std::int64_t>(warps_of_token, 4));
    parts = static_cast<unsigned>((warps_of_token + warps - 1) / warps);
  }
};

// Merges each row by a warp. The kernel writes every row, even rows outside every sequence and rows of queries that are
// not in use.
template <class T, int kColumns>
__global__ void __launch_bounds__(128, MergeLanes<kColumns>::kBlocks)
    attention_merge_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                           const __grid_constant__ MergeGrid g) {
  const unsigned place = blockIdx.x / g.parts;
  const unsigned head = ((blockIdx.x - place * g.parts) * g.warps + threadIdx.x / 32) * g.heads;
  const auto heads = static_cast<unsigned>(p.num_q_heads);
  if (head >= heads) return;
  const MergedToken token(p, static_cast<int>(place));
  wait_for_previous_kernel();
  allow_next_kernel();  // after the wait: the next kernel's blocks would spread unevenly while splits run
  MergeHeads<T, kColumns>(p, call, token, place, static_cast<int>(head), static_cast<int>(min(g.heads, heads - head)))
      .run();
}

// Merges each row by a block of threads, and writes every row, too.
constexpr std::int64_t kFewMergedRows = 128;  // with more rows than this, a merge by warps is faster
template <class T, int kColumns>
__global__ void __launch_bounds__(128)
    attention_merge_few_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call) {
  const std::int64_t row = blockIdx.x, head = row % p.num_q_heads, at = row * call.splits;
  const AttentionQuery query(p, row / p.num_q_heads);
  wait_for_previous_kernel();
  allow_next_kernel();  // after the wait, as above
  merge_row_by_block<T, kColumns>(p, call, query.sees, query.sequence, query.token, head, row, at);
}

// Runs the splits and their merge. launch(call, blocks) must launch the splits.
template <class T, bool kOverlap, class Launch>
void run_splits(const AttentionParams& p, const SplitGrid& grid, cudaStream_t stream, Launch&& launch) {
  const std::int64_t rows = attention_rows(p) * p.num_q_heads;
  auto* results = static_cast<float*>(p.workspace);
  const SplitCall call = {static_cast<std::uint32_t>(grid.tiles),
                          static_cast<std::uint32_t>(grid.splits),
                          static_cast<std::uint32_t>(grid.stride),
                          static_cast<std::uint32_t>(p.num_kv_heads),
                          static_cast<std::uint32_t>(p.num_q_heads / p.num_kv_heads),
                          grid.merges,
                          results,
                          results + grid.sums_at,
                          grid.long_first ? static_cast<std::uint32_t>(grid.blocks / grid.stride) : 0};
  if (grid.blocks > 0) {
    launch(call, checked_blocks(grid.blocks, "attention"));
    check(cudaGetLastError(), "launch of attention's splits");
  }
  if (!grid.merges) return;
  const auto merge = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    if (rows <= kFewMergedRows) {
      return launch_dependent<kOverlap>(attention_merge_few_kernel<T, std::max(kColumns, 128)>,
                                        static_cast<int>(checked_blocks(rows, "attention")), 128, 0, stream, p, call);
    }
    const MergeGrid g(rows, p.num_q_heads);
    launch_dependent<kOverlap>(attention_merge_kernel<T, kColumns>,
                               static_cast<int>(checked_blocks(attention_rows(p) * g.parts, "attention")),
                               static_cast<int>(g.warps * 32), 0, stream, p, call, g);
  };
  if (p.value_dim <= 64) {
    merge(std::integral_constant<int, 64>());
  } else {
    p.value_dim <= 128 ? merge(std::integral_constant<int, 128>()) : merge(std::integral_constant<int, 256>());
  }
}

}  // namespace
}  // namespace rlk::cuda
