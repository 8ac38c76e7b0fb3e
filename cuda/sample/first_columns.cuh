// Finds the first columns of a row, in the order of descending z. The largest z of each leaf shows which leaves can
// hold such columns. A block lists the columns of these leaves. finish.cuh and sample_best.cu use the list.
#pragma once

#include <cstring>

#include "draw.cuh"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kRowWarps = kRowThreads / kWarp, kMostWarps = kManyThreads / kWarp;
constexpr int kMostSlots = 4096;   // leaf slots of the largest vocabulary
constexpr int kMostListed = 1024;  // the most columns in a list
static_assert((kSampleVocab + kLeafColumns - 1) / kLeafColumns <= kMostSlots);

struct FinishShared {
  SampleShared base;                 // `base` holds other data while no selection runs: see FinishedRow's accessors
  float2 roots[kMostSlots / kWarp];  // one for every 32 neighbouring slots
  uint4 counts[2][kMostWarps];
  std::uint64_t wide[kMostWarps];
  std::uint32_t bitmap[kMostSlots / 32];  // slots that keep a column
  std::uint32_t before[kMostSlots / 32];  // number of set bits before each word of bitmap
  std::int64_t kept_begin;
  std::uint32_t words[kDrawWords];
  std::uint8_t drawn[kMostSlots / kWarp];  // the drawn slot among 32 neighbouring slots
  int cuts[kNumParts + 1];
  std::uint32_t listed, slots;
  uint3 bin;  // index of a bin of keys, number of keys before the bin, number of keys up to the bin's end
};
static_assert(sizeof(FinishShared) <= 48 * 1024);

__device__ __forceinline__ int thread_of_block() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ __forceinline__ int warp_of_block() { return static_cast<int>(threadIdx.x / kWarp); }

// The sum over a block of kThreads threads. Consecutive calls must use different buffers.
template <int kThreads = kRowThreads>
__device__ __forceinline__ std::uint32_t block_sum(std::uint32_t x, FinishShared* s, int buffer) {
  x = __reduce_add_sync(kAllLanes, x);
  if (lane_of_warp() == 0) s->counts[buffer][warp_of_block()].x = x;
  __syncthreads();
  constexpr int kWarps = kThreads / kWarp;
  const std::uint32_t sum = s->counts[buffer][lane_of_warp() % kWarps].x;
  return __reduce_add_sync(kAllLanes, lane_of_warp() < kWarps ? sum : 0);
}
// Applies fn, a shuffle of 32-bit words, to each word of a value.
template <class N, class F>
__device__ __forceinline__ N exchanged(const N& x, F fn) {
  static_assert(sizeof(N) % 4 == 0);
  std::uint32_t words[sizeof(N) / 4];
  memcpy(words, &x, sizeof(N));
#pragma unroll
  for (std::uint32_t& word : words) word = fn(word);
  N other;
  memcpy(&other, words, sizeof(N));
  return other;
}
// The sum over a block, for any type with an addition. block_scan returns the sum over all threads before this thread.
// of_warps has one value for each warp. Consecutive calls must pass different arrays.
template <int kThreads = kRowThreads, class N>
__device__ __forceinline__ N block_sum(N x, N* of_warps) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    x = x + exchanged(x, [d](std::uint32_t word) { return __shfl_xor_sync(kAllLanes, word, d); });
  }
  if (lane_of_warp() == 0) of_warps[warp_of_block()] = x;
  __syncthreads();
  N sum = of_warps[0];
#pragma unroll
  for (int i = 1; i < kThreads / kWarp; ++i) sum = sum + of_warps[i];
  return sum;
}
template <int kThreads = kRowThreads, class N>
__device__ __forceinline__ N block_scan(const N& x, N* of_warps) {
  const auto of_lower = [](const N& of, int d) {
    return exchanged(of, [d](std::uint32_t word) { return __shfl_up_sync(kAllLanes, word, d); });
  };
  N sum = x;
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const N other = of_lower(sum, d);
    if (lane_of_warp() >= d) sum = sum + other;
  }
  if (lane_of_warp() == kWarp - 1) of_warps[warp_of_block()] = sum;
  __syncthreads();
  N before = of_lower(sum, 1);
  if (lane_of_warp() == 0) before = N{};
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) {
    if (i < warp_of_block()) before = before + of_warps[i];
  }
  return before;
}
template <int kThreads = kRowThreads>
__device__ __forceinline__ std::uint32_t block_scan(std::uint32_t x, FinishShared* s, int buffer) {
  return block_scan<kThreads>(x, reinterpret_cast<std::uint32_t*>(s->counts[buffer]));
}
template <int kThreads = kRowThreads>
__device__ __forceinline__ std::uint64_t block_sum(std::uint64_t x, FinishShared* s) {
  return block_sum<kThreads>(x, s->wide);
}

// key_of() returns an integer key that ascends with z. z_of_key() returns the z of a key.
__device__ __forceinline__ std::uint32_t key_of(float z) {
  return ~static_cast<std::uint32_t>(rank_of(z, 0) >> kIdBits);
}
__device__ __forceinline__ float z_of_key(std::uint32_t key) { return z_of_rank(std::uint64_t{~key} << kIdBits); }

// Maps leaf slots to columns. `cuts`, in shared memory, holds the boundaries between the parts of the vocabulary.
struct SlotMap {
  const int* cuts;
  int valid, height;

  // Fills `cuts`. The caller then passes a barrier.
  static __device__ __forceinline__ SlotMap make(const SampleParams& p, int* cuts) {
    if (thread_of_block() <= kNumParts) {
      cuts[thread_of_block()] = static_cast<int>(part_cut(p.vocab_size, thread_of_block()));
    }
    return {cuts, static_cast<int>(p.valid_vocab), leaf_height(p.vocab_size)};
  }
  // First column of a slot. `columns`: the number of the slot's valid columns.
  __device__ __forceinline__ int first(int slot, int* columns) const {
    const int part = slot >> height, at = cuts[part] + (slot - (part << height)) * kLeafColumns;
    *columns = max(0, min(kLeafColumns, min(cuts[part + 1], valid) - at));
    return at;
  }
  __device__ __forceinline__ bool has_columns(int slot) const {
    int columns;
    first(slot, &columns);
    return columns > 0;
  }
  // Whether scans store a root for every 32 slots: true if each group of a scan holds slots of one part (group_grid).
  __device__ __forceinline__ bool scans_roots() const { return most_columns() > kGroupColumns / 2; }
  // The largest number of columns, and of leaves, in a part.
  __device__ __forceinline__ int most_columns() const {
    int longest = 0;
#pragma unroll
    for (int i = 0; i < kNumParts; ++i) longest = max(longest, min(cuts[i + 1], valid) - cuts[i]);
    return longest;
  }
  __device__ __forceinline__ int most_leaves() const { return (most_columns() + kLeafColumns - 1) / kLeafColumns; }
  // Slot of a column; `at`: the column's number in the slot.
  __device__ __forceinline__ int slot_of(int column, int* at) const {
    int part = 0;
#pragma unroll
    for (int i = 1; i < kNumParts; ++i) part += column >= cuts[i] ? 1 : 0;
    const int local = column - cuts[part];
    *at = local % kLeafColumns;
    return (part << height) + local / kLeafColumns;
  }
};

// A column's place: its leaf slot, then its number in the leaf. Places ascend with ids.
__device__ __forceinline__ int place_of(int slot, int column) { return slot * kLeafColumns + column; }
// The id of the last column whose place is at most `place`.
__device__ __forceinline__ int id_of_place(const SlotMap& map, int place) {
  const int part = min(place / kLeafColumns >> map.height, kNumParts - 1);
  return min(map.cuts[part] + place - (part << map.height) * kLeafColumns, map.cuts[part + 1] - 1);
}

// Keys of the leaves' largest z. Each thread has the keys of its own leaves in registers. The key of a leaf without
// columns is 0.
template <int kThreads>
struct LeafKeys {
  static constexpr int kOwnKeys = kMostSlots / kThreads;
  std::uint32_t own[kOwnKeys];
  int slots;
  std::uint32_t largest, smallest, present;  // bounds and number of the keys above 0; a NaN has the largest key of all
  int slot;                                  // first leaf with the largest key

  // Calls fn(key, slot) for the thread's leaves.
  template <class F>
  __device__ __forceinline__ void each(F fn) const {
#pragma unroll
    for (int k = 0; k < kOwnKeys; ++k) {
      if (k * kThreads >= slots) break;
      fn(own[k], k * kThreads + thread_of_block());
    }
  }
};
// Stands for the edits of a row whose list needs none: the row has no edits, or the scan has already applied them. If a
// row's edits are applied when its list is made, a type of sample_edited.cu replaces NoEdits. The members are:
//   key(slot, key)   a key that some column of the thread's leaf reaches; `key`: the leaf's largest before the edits
//   reach(slot, key) a key that no column of this leaf exceeds; `key`: the result of key(), if it is not 0
//   bins(s)          shared memory for a word of each thread
//   has(id)          whether a column is edited
//   each(fn)         calls fn(rank) for the thread's edited columns that are allowed
struct NoEdits {
  static constexpr bool kAny = false;
  __device__ __forceinline__ std::uint32_t key(int, std::uint32_t key) const { return key; }
  __device__ __forceinline__ std::uint32_t reach(int, std::uint32_t key) const { return key; }
  __device__ __forceinline__ std::uint32_t* bins(FinishShared* s) const {
    return reinterpret_cast<std::uint32_t*>(s->base.masses);
  }
};
template <int kThreads, class Edits = NoEdits>
__device__ __forceinline__ LeafKeys<kThreads> load_keys(const float* tops, int slots, const SlotMap& map,
                                                        FinishShared* s, const Edits& edits = {}) {
  constexpr int kOwnKeys = LeafKeys<kThreads>::kOwnKeys, kWarps = kThreads / kWarp;
  LeafKeys<kThreads> keys;
  keys.slots = slots;
  float top[kOwnKeys];
#pragma unroll
  for (int k = 0; k < kOwnKeys; ++k) {
    const int slot = k * kThreads + thread_of_block();
    top[k] = slot < slots ? tops[slot] : 0.0f;
  }
  std::uint32_t largest = 0, smallest = ~0u, present = 0;
  int first = kMostSlots;
#pragma unroll
  for (int k = 0; k < kOwnKeys; ++k) {
    const int slot = k * kThreads + thread_of_block();
    keys.own[k] = 0;
    if (k * kThreads >= slots || slot >= slots || !map.has_columns(slot)) continue;
    const std::uint32_t key = edits.key(slot, is_nan(top[k]) ? ~0u : key_of(top[k]));
    keys.own[k] = key;
    first = key > largest ? slot : first;
    largest = max(largest, key);
    smallest = min(smallest, key);
    ++present;
  }
  std::uint32_t all = __reduce_max_sync(kAllLanes, largest);
  first = __reduce_min_sync(kAllLanes, largest == all ? first : kMostSlots);
  smallest = __reduce_min_sync(kAllLanes, smallest);
  present = __reduce_add_sync(kAllLanes, present);
  if (lane_of_warp() == 0) {
    s->counts[0][warp_of_block()] = make_uint4(all, static_cast<std::uint32_t>(first), smallest, present);
  }
  __syncthreads();
  const uint4 of_warp = s->counts[0][lane_of_warp() % kWarps];
  keys.largest = __reduce_max_sync(kAllLanes, of_warp.x);
  keys.slot = __reduce_min_sync(kAllLanes, of_warp.x == keys.largest ? static_cast<int>(of_warp.y) : kMostSlots);
  keys.smallest = __reduce_min_sync(kAllLanes, of_warp.z);
  keys.present = __reduce_add_sync(kAllLanes, lane_of_warp() < kWarps ? of_warp.w : 0);
  return keys;
}

constexpr int kKeyBinBits = 8;
static_assert(1 << kKeyBinBits == kRowThreads);
// A bound that at least `count` keys reach, but not many more keys unless keys are equal; 0 if there are fewer keys.
// `bins`: one word for each thread; the first bin has the largest keys.
__device__ __forceinline__ std::uint32_t bound_of_keys(const LeafKeys<kRowThreads>& keys, std::uint32_t count,
                                                       FinishShared* s, std::uint32_t* bins) {
  if (keys.present < count) return 0;
  std::uint32_t low = keys.smallest, high = keys.largest, above = 0, reach = keys.present;
  const std::uint32_t enough = count + count / 2 + 8;
#pragma unroll 1
  while (reach > enough && high > low) {
    const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - kKeyBinBits);
    bins[thread_of_block()] = 0;
    __syncthreads();
    keys.each([&](std::uint32_t key, int) {
      if (key >= low && key <= high) atomicAdd(bins + (high - key >> shift), 1u);
    });
    __syncthreads();
    const std::uint32_t own = bins[thread_of_block()], before = above + block_scan(own, s, 0);
    if (before < count && before + own >= count) s->bin = make_uint3(thread_of_block(), before, before + own);
    __syncthreads();
    const uint3 bin = s->bin;
    const std::uint32_t top = high - (bin.x << shift), step = (1u << shift) - 1;
    high = top;
    low = top - low > step ? top - step : low;
    above = bin.y;
    reach = bin.z;
  }
  return low;
}

// z[i] of an array in registers.
__device__ __forceinline__ float element_of(const float (&z)[16], int i) {
  float x[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) x[k] = (i & 8) != 0 ? z[k + 8] : z[k];
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) x[k] = (i & half) != 0 ? x[k + half] : x[k];
  }
  return x[0];
}

// Describes a list, in base.list, of the ranks of present columns. A rank is an integer that orders columns by
// descending z, then by id. The list holds every column whose key is at least `bound`. So if the list has `count`
// columns or more, it holds the first `count` columns of the row. size is -1 if the list has no room for the columns.
struct FirstColumns {
  int size;
  std::uint32_t bound;
};
// The type of `columns` has is_allowed(id), has_edits(), is_edited(id) and edit_at(id) as in SampleColumns, and
// logit_at(id), which returns z before edits.
template <class Columns, class Edits = NoEdits>
__device__ __forceinline__ FirstColumns list_first_columns(const LeafKeys<kRowThreads>& keys, std::uint32_t count,
                                                           const SlotMap& map, FinishShared* s, const Columns& columns,
                                                           const Edits& edits = {}) {
  auto* const found = reinterpret_cast<std::uint16_t*>(s->base.counts);
  static_assert(sizeof s->base.counts >= 2 * kMostSlots);
  if (thread_of_block() == 0) s->listed = s->slots = 0;
  const std::uint32_t bound = bound_of_keys(keys, count, s, edits.bins(s));
  __syncthreads();
  keys.each([&](std::uint32_t key, int slot) {
    if (key != 0 && edits.reach(slot, key) >= bound) found[atomicAdd(&s->slots, 1u)] = static_cast<std::uint16_t>(slot);
  });
  __syncthreads();
  const int leaves = static_cast<int>(s->slots);
  if (leaves > kMostListed) return {-1, bound};
  constexpr int kAtOnce = 4;
#pragma unroll 1
  for (int k = warp_of_block(); k < leaves; k += kRowWarps * kAtOnce) {
    float z[kAtOnce * kOwnColumns];
    std::uint32_t above = 0;  // bit i: whether the key of z[i] reaches the bound
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      int valid;
      const int first = map.first(found[min(k + u * kRowWarps, leaves - 1)], &valid);
      if (k + u * kRowWarps >= leaves) valid = 0;
#pragma unroll
      for (int i = 0; i < kOwnColumns; ++i) {
        const int column = i * kWarp + lane_of_warp();
        z[u * kOwnColumns + i] = column < valid ? columns.logit_at(first + column) : -infinity();
        above |= column < valid ? 1u << (u * kOwnColumns + i) : 0;
      }
    }
    if (!Edits::kAny && columns.has_edits()) {
      std::uint32_t edited = 0;  // bit i: whether z[i] is edited
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        int valid;
        const int first = map.first(found[min(k + u * kRowWarps, leaves - 1)], &valid) + lane_of_warp();
#pragma unroll
        for (int i = 0; i < kOwnColumns; ++i) {
          const bool has = columns.is_edited(min(first + i * kWarp, map.valid - 1));
          edited |= has ? 1u << (u * kOwnColumns + i) : 0;
        }
      }
      edited &= above;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        int valid;
        const int first = map.first(found[min(k + u * kRowWarps, leaves - 1)], &valid) + lane_of_warp();
#pragma unroll
        for (int i = 0; i < kOwnColumns; ++i) {
          const int at = u * kOwnColumns + i;
          if ((edited >> at & 1) != 0) z[at] = columns.edit_at(first + i * kWarp);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce * kOwnColumns; ++i) above &= ~(key_of(z[i]) < bound ? 1u << i : 0);
#pragma unroll 1
    for (; above != 0; above &= above - 1) {
      const int i = lowest_bit_of(above);
      int valid;
      const int first = map.first(found[k + i / kOwnColumns * kRowWarps], &valid);
      const int id = first + i % kOwnColumns * kWarp + lane_of_warp();
      if (!columns.is_allowed(id)) continue;
      if constexpr (Edits::kAny) {
        if (edits.has(id)) continue;
      }
      const std::uint32_t at = atomicAdd(&s->listed, 1u);
      if (at < kMostListed) s->base.list[at] = rank_of(element_of(z, i), id);
    }
  }
  if constexpr (Edits::kAny) {
    edits.each([&](std::uint64_t rank) {
      if (~static_cast<std::uint32_t>(rank >> kIdBits) < bound) return;
      const std::uint32_t at = atomicAdd(&s->listed, 1u);
      if (at < kMostListed) s->base.list[at] = rank;
    });
  }
  __syncthreads();
  const std::uint32_t size = s->listed;
  return {size <= kMostListed ? static_cast<int>(size) : -1, bound};
}

}  // namespace
}  // namespace rlk::cuda
