// Sorts the tokens of the gradient by row, and within a row by index, for embedding_backward.cu. Bound by latency, not
// by memory.
//
// The sort is a stable radix sort by digits of the row index, the lowest digit first. A pass consists of three kernels:
// embedding_count_kernel: a block counts the digits of its tile. The first pass makes the keys from the ids.
// embedding_begin_kernel: one block computes prefix sums of the counts, which say where each tile's tokens with each
//   digit begin.
// embedding_scatter_kernel: a warp takes 256 keys in order, 32 at a time. match.any finds equal digits; keys with equal
//   digits take positions in lane order. The last pass marks the rows that have a token.
// After the last pass, embedding_item_counts_kernel and embedding_items_kernel write the items (kernels.h): each long
// run becomes one item. No result depends on the order in which blocks or warps run, because the only atomics are
// integer sums. All architectures share this source; each has its own machine code.
#pragma once

#include "../common/dependent_launch.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kSortThreads = 256, kSortWarps = kSortThreads / 32;
constexpr int kWarpKeys = kEmbeddingSortTile / kSortWarps, kRounds = kWarpKeys / 32;

struct Digit {
  int shift;  // the digit's lowest bit in a key
  std::uint32_t mask;
  __device__ __forceinline__ std::uint32_t of(EmbeddingKey key) const {
    return static_cast<std::uint32_t>(key >> shift) & mask;
  }
};

__device__ __forceinline__ std::int64_t row_of(EmbeddingKey key) { return static_cast<std::int64_t>(key >> 32); }

template <bool kFromIds>
__device__ __forceinline__ EmbeddingKey key_at(const EmbeddingBackwardParams& p, const EmbeddingKey* keys,
                                               std::int64_t i) {
  if constexpr (kFromIds) {
    return static_cast<EmbeddingKey>(embedding_grad_row(p, embedding_id(p, i))) << 32 | static_cast<EmbeddingKey>(i);
  } else {
    return keys[i];
  }
}

template <bool kFromIds>
__global__ void __launch_bounds__(kSortThreads)
    embedding_count_kernel(const __grid_constant__ EmbeddingBackwardParams p,
                           const __grid_constant__ EmbeddingWorkspace w, const EmbeddingKey* keys, Digit digit) {
  __shared__ std::uint32_t counts[kEmbeddingDigits];
  wait_for_previous_kernel();
  allow_next_kernel();
  for (int d = static_cast<int>(threadIdx.x); d < kEmbeddingDigits; d += kSortThreads) counts[d] = 0;
  if (kFromIds && !p.accumulate) {  // the memory of `present` ends with a whole vector
    const std::int64_t step = std::int64_t{gridDim.x} * kSortThreads;
    for (std::int64_t v = std::int64_t{blockIdx.x} * kSortThreads + threadIdx.x; 16 * v < p.num_rows; v += step) {
      reinterpret_cast<uint4*>(w.present)[v] = make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();
  const std::int64_t first = std::int64_t{blockIdx.x} * kEmbeddingSortTile + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kEmbeddingSortTile / kSortThreads; ++i) {
    const std::int64_t at = first + i * kSortThreads;
    if (at < p.num_tokens) atomicAdd(&counts[digit.of(key_at<kFromIds>(p, keys, at))], 1u);
  }
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < kEmbeddingDigits; d += kSortThreads) {
    w.counts[std::int64_t{d} * gridDim.x + blockIdx.x] = counts[d];
  }
}

// The sum of the values of all lanes up to and including this lane.
__device__ __forceinline__ std::uint32_t sum_to_lane(std::uint32_t x) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::uint32_t before = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += before;
  }
  return x;
}

constexpr int kBeginThreads = 1024, kBeginValues = 8;

__global__ void __launch_bounds__(kBeginThreads) embedding_begin_kernel(std::uint32_t* counts, std::int64_t num) {
  __shared__ std::uint32_t of_warps[kBeginThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  std::uint32_t before = 0;
#pragma unroll 1
  for (std::int64_t first = 0; first < num; first += kBeginThreads * kBeginValues) {
    const std::int64_t mine = first + std::int64_t{threadIdx.x} * kBeginValues;  // num is a multiple of kBeginValues
    uint4 values[kBeginValues / 4]{};
    std::uint32_t sum = 0;
    if (mine < num) {
#pragma unroll
      for (int i = 0; i < kBeginValues / 4; ++i) values[i] = reinterpret_cast<const uint4*>(counts + mine)[i];
    }
#pragma unroll
    for (const uint4& v : values) sum += v.x + v.y + v.z + v.w;
    const std::uint32_t to_lane = sum_to_lane(sum);
    if (lane == 31) of_warps[warp] = to_lane;
    __syncthreads();
    const std::uint32_t to_warp = sum_to_lane(of_warps[lane]);
    const std::uint32_t all = __shfl_sync(~0u, to_warp, 31);
    const std::uint32_t warps_before = __shfl_sync(~0u, to_warp, (warp + 31) % 32);
    std::uint32_t begin = before + (warp == 0 ? 0 : warps_before) + to_lane - sum;
    if (mine < num) {
#pragma unroll
      for (int i = 0; i < kBeginValues / 4; ++i) {
        const uint4 v = values[i];
        reinterpret_cast<uint4*>(counts + mine)[i] =
            make_uint4(begin, begin + v.x, begin + v.x + v.y, begin + v.x + v.y + v.z);
        begin += v.x + v.y + v.z + v.w;
      }
    }
    before += all;
    __syncthreads();
  }
}

template <bool kFromIds, bool kLast>
__global__ void __launch_bounds__(kSortThreads)
    embedding_scatter_kernel(const __grid_constant__ EmbeddingBackwardParams p,
                             const __grid_constant__ EmbeddingWorkspace w, const EmbeddingKey* from, EmbeddingKey* to,
                             Digit digit) {
  __shared__ std::uint32_t places[kSortWarps][kEmbeddingDigits];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t first = std::int64_t{blockIdx.x} * kEmbeddingSortTile + warp * kWarpKeys + lane;
  EmbeddingKey keys[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const std::int64_t at = first + i * 32;
    keys[i] = at < p.num_tokens ? key_at<kFromIds>(p, from, at) : 0;
  }
  for (int i = static_cast<int>(threadIdx.x); i < kSortWarps * kEmbeddingDigits; i += kSortThreads) {
    (&places[0][0])[i] = 0;
  }
  __syncthreads();
  std::uint32_t rank[kRounds];  // rank among the warp's keys of the same digit
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const bool exists = first + i * 32 < p.num_tokens;
    const std::uint32_t d = digit.of(keys[i]);
    const unsigned equal = __match_any_sync(~0u, exists ? d : ~0u);
    const std::uint32_t before = places[warp][d];
    rank[i] = before + static_cast<std::uint32_t>(__popc(equal & ((1u << lane) - 1)));
    __syncwarp();
    if (exists && lane == __ffs(static_cast<int>(equal)) - 1) {
      places[warp][d] = before + static_cast<std::uint32_t>(__popc(equal));
    }
    __syncwarp();
  }
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < kEmbeddingDigits; d += kSortThreads) {
    std::uint32_t place = w.counts[std::int64_t{d} * gridDim.x + blockIdx.x];
#pragma unroll
    for (int i = 0; i < kSortWarps; ++i) {
      const std::uint32_t count = places[i][d];
      places[i][d] = place;
      place += count;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (first + i * 32 >= p.num_tokens) continue;
    to[places[warp][digit.of(keys[i])] + rank[i]] = keys[i];
    if (kLast && !p.accumulate && row_of(keys[i]) < p.num_rows) w.present[row_of(keys[i])] = 1;
  }
}

constexpr int kItemThreads = 256, kItemRounds = kEmbeddingItemTile / kItemThreads;
constexpr int kAround = kEmbeddingLongRun - 1;  // whether a token's run is long depends on this many keys to each side
static_assert((kEmbeddingLongRun & kAround) == 0);

// For each key of a tile, and of the kAround keys before and after it: a number that is equal for all keys of a run.
struct TileRuns {
  EmbeddingKey run[kEmbeddingItemTile + 2 * kAround];

  __device__ __forceinline__ void load(const EmbeddingKey* keys, std::int64_t num, std::int64_t first) {
    for (int i = static_cast<int>(threadIdx.x); i < kEmbeddingItemTile + 2 * kAround; i += kItemThreads) {
      const std::int64_t at = first - kAround + i;
      run[i] = at >= 0 && at < num ? keys[at] >> kEmbeddingRunBits : ~EmbeddingKey{0};
    }
  }
  // Number of tokens of the same run that follow token i of the tile (`direction` 1) or precede it (-1), at most
  // kAround. The tokens of a run are consecutive.
  __device__ __forceinline__ int same(int i, int direction) const {
    const EmbeddingKey mine = run[kAround + i];
    int count = 0;
#pragma unroll
    for (int step = kEmbeddingLongRun / 2; step > 0; step /= 2) {
      if (run[kAround + i + direction * (count + step)] == mine) count += step;
    }
    return count;
  }
  __device__ __forceinline__ bool is_item(int i, bool* is_long) const {
    const int before = same(i, -1);
    *is_long = before + 1 + same(i, 1) >= kEmbeddingLongRun;
    return !*is_long || before == 0;
  }
};

__device__ __forceinline__ bool has_row(const TileRuns& tile, int i, std::int64_t num_rows) {
  const EmbeddingKey run = tile.run[kAround + i];
  return run != ~EmbeddingKey{0} && static_cast<std::int64_t>(run >> (32 - kEmbeddingRunBits)) < num_rows;
}

__global__ void __launch_bounds__(kItemThreads)
    embedding_item_counts_kernel(const __grid_constant__ EmbeddingBackwardParams p,
                                 const __grid_constant__ EmbeddingWorkspace w, const EmbeddingKey* keys) {
  __shared__ TileRuns tile;
  wait_for_previous_kernel();
  allow_next_kernel();
  tile.load(keys, p.num_tokens, std::int64_t{blockIdx.x} * kEmbeddingItemTile);
  __syncthreads();
  int count = 0;
#pragma unroll
  for (int i = 0; i < kItemRounds; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kItemThreads;
    bool is_long;
    count += __syncthreads_count(has_row(tile, at, p.num_rows) && tile.is_item(at, &is_long));
  }
  if (threadIdx.x == 0) w.item_counts[blockIdx.x] = static_cast<std::uint32_t>(count);
}

__global__ void __launch_bounds__(kItemThreads)
    embedding_items_kernel(const __grid_constant__ EmbeddingBackwardParams p,
                           const __grid_constant__ EmbeddingWorkspace w, const EmbeddingKey* keys) {
  constexpr int kWarps = kItemThreads / 32;
  static_assert(kItemRounds * kWarps == 32);
  __shared__ TileRuns tile;
  __shared__ std::uint32_t of_warps[32], begins[32], before_tile;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) before_tile = 0;
  wait_for_previous_kernel();
  allow_next_kernel();
  const std::int64_t first = std::int64_t{blockIdx.x} * kEmbeddingItemTile;
  tile.load(keys, p.num_tokens, first);
  std::uint32_t before = 0;
  for (unsigned i = threadIdx.x; i < blockIdx.x; i += kItemThreads) before += w.item_counts[i];
  __syncthreads();
  if (before > 0) atomicAdd(&before_tile, before);
  unsigned mask[kItemRounds];
  bool is_long[kItemRounds];
#pragma unroll
  for (int i = 0; i < kItemRounds; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kItemThreads;
    is_long[i] = false;
    mask[i] = __ballot_sync(~0u, has_row(tile, at, p.num_rows) && tile.is_item(at, &is_long[i]));
    if (lane == 0) of_warps[i * kWarps + warp] = static_cast<std::uint32_t>(__popc(mask[i]));
  }
  __syncthreads();
  if (warp == 0) {
    const std::uint32_t sum = sum_to_lane(of_warps[lane]);
    begins[lane] = before_tile + sum - of_warps[lane];
    if (lane == 31 && blockIdx.x == gridDim.x - 1) *w.num_items = before_tile + sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItemRounds; ++i) {
    if (!(mask[i] >> lane & 1u)) continue;
    const std::int64_t at = first + static_cast<int>(threadIdx.x) + i * kItemThreads;
    const EmbeddingKey key = keys[at];
    const std::uint32_t token = static_cast<std::uint32_t>(key);
    EmbeddingItem item{static_cast<std::uint32_t>(key >> 32), token, kEmbeddingNoSlot, 0};
    if (is_long[i]) {
      // At least one index in a long run is a multiple of kEmbeddingLongRun. The first of these indices, divided by
      // kEmbeddingLongRun, is the run's slot, so no two runs share a slot.
      item.slot = static_cast<std::uint32_t>((at + kAround) / kEmbeddingLongRun);
      item.token = token >> kEmbeddingRunBits << kEmbeddingRunBits;
    }
    w.items[begins[i * kWarps + warp] + __popc(mask[i] & ((1u << lane) - 1))] = item;
  }
}

// Sorts the keys, writes the items, and returns the sorted keys.
template <bool kOverlap>
const EmbeddingKey* run_sort(const EmbeddingBackwardParams& p, const EmbeddingWorkspace& w, cudaStream_t stream) {
  const auto tiles_of = [&](int tile) { return static_cast<int>((p.num_tokens + tile - 1) / tile); };
  const int tiles = tiles_of(kEmbeddingSortTile);
  int bits = 1;  // bits of a row index; num_rows, which stands for no row, also has to fit
  while (p.num_rows >> bits != 0) ++bits;
  const int passes = (bits + kEmbeddingDigitBits - 1) / kEmbeddingDigitBits, width = (bits + passes - 1) / passes;
  const EmbeddingKey* from = nullptr;
  for (int pass = 0; pass < passes; ++pass) {
    const Digit digit = {32 + pass * width, (1u << width) - 1};
    EmbeddingKey* const to = w.keys[pass % 2];
    const bool is_last = pass == passes - 1;
    if (pass == 0) {
      launch_dependent<false>(embedding_count_kernel<true>, tiles, kSortThreads, 0, stream, p, w, from, digit);
    } else {
      launch_dependent<kOverlap>(embedding_count_kernel<false>, tiles, kSortThreads, 0, stream, p, w, from, digit);
    }
    launch_dependent<kOverlap>(embedding_begin_kernel, 1, kBeginThreads, 0, stream, w.counts,
                               std::int64_t{kEmbeddingDigits} * tiles);
    auto* scatter = pass == 0
                        ? (is_last ? embedding_scatter_kernel<true, true> : embedding_scatter_kernel<true, false>)
                        : (is_last ? embedding_scatter_kernel<false, true> : embedding_scatter_kernel<false, false>);
    launch_dependent<kOverlap>(scatter, tiles, kSortThreads, 0, stream, p, w, from, to, digit);
    from = to;
  }
  const int item_tiles = tiles_of(kEmbeddingItemTile);
  launch_dependent<kOverlap>(embedding_item_counts_kernel, item_tiles, kItemThreads, 0, stream, p, w, from);
  launch_dependent<kOverlap>(embedding_items_kernel, item_tiles, kItemThreads, 0, stream, p, w, from);
  return from;
}

}  // namespace
}  // namespace rlk::cuda
