// The forward of attention for sequences with few queries: the two launches of a call. The first launch computes the
// sums m, l and O of each split of the keys. The second launch merges the splits of each row.
#pragma once

#include "../../common/dependent_launch.cuh"
#include "rows.cuh"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Merges the splits of a row (a query of one head) by one warp. `sees` is the range of keys that no mask hides from the
// row, and `row` is the row's index in `out`. `at` is the index of the sums of the row's split 0.
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

// Merges each row by a warp or, if kByBlock, by a block of threads. The kernel writes every row, even rows outside
// every sequence and rows of queries that are not in use.
constexpr std::int64_t kFewMergedRows = 128;  // with more rows than this, a merge by warps is faster
template <class T, int kColumns, bool kByBlock>
__global__ void __launch_bounds__(128)
    attention_merge_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ SplitCall call,
                           std::int64_t rows) {
  const std::int64_t row = kByBlock ? blockIdx.x : blockIdx.x * std::int64_t{4} + threadIdx.x / 32;
  if (row >= rows) return;
  const std::int64_t head = row % p.num_q_heads, at = row * call.splits;
  const AttentionQuery query(p, row / p.num_q_heads);
  wait_for_previous_kernel();
  allow_next_kernel();  // after the wait: the next kernel's blocks would spread unevenly while splits run
  if constexpr (kByBlock) {
    merge_row_by_block<T, kColumns>(p, call, query.sees, query.sequence, query.token, head, row, at);
  } else {
    merge_row<T, kColumns>(p, call, query.sees, query.sequence, query.token, head, row, at);
  }
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
  const auto merge = [&](auto columns, auto by_block) {
    constexpr bool kByBlock = decltype(by_block)::value;
    const std::int64_t blocks = kByBlock ? rows : (rows + 3) / 4;
    launch_dependent<kOverlap>(attention_merge_kernel<T, decltype(columns)::value, kByBlock>,
                               static_cast<int>(checked_blocks(blocks, "attention")), 128, 0, stream, p, call, rows);
  };
  const auto merge_columns = [&](auto columns) {
    rows <= kFewMergedRows ? merge(columns, std::true_type()) : merge(columns, std::false_type());
  };
  p.value_dim <= 128 ? merge_columns(std::integral_constant<int, 128>())
                     : merge_columns(std::integral_constant<int, 256>());
}

}  // namespace
}  // namespace rlk::cuda
