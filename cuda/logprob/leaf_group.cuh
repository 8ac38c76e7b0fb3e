// Statistics of up to 32 leaves of one row by one warp: load through shared memory, one lane a leaf, tree by shuffles.
// Shared by the sm_80 and sm_90 kernels, which differ in how they carry the groups' nodes to the root.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/element.cuh"
#include "group_grid.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kGroupLeaves = kWarp;
static_assert(kGroupColumns == kGroupLeaves * kLeafColumns);
constexpr int kOctetsPerLeaf = kLeafColumns / kOctet;
constexpr int kKeptWords = kGroupColumns / 32;  // bitmap of a group's kept columns

template <class T>
constexpr int kGroupBytes = kGroupColumns * static_cast<int>(sizeof(typename T::Storage));

__device__ __forceinline__ std::int64_t load_index(const void* ids, DType dtype, std::int64_t i) {
  return dtype == DType::kInt64 ? static_cast<const std::int64_t*>(ids)[i] : static_cast<const std::int32_t*>(ids)[i];
}
__device__ __forceinline__ std::int64_t target_of(const LogprobInput& p, std::int64_t row) {
  return load_index(p.target, p.target_dtype, p.target_rows.offset(row));
}
__device__ __forceinline__ float temperature_of(const LogprobInput& p, std::int64_t row) {
  return p.temperature ? p.temperature[row] : p.temperature_value;
}
__device__ __forceinline__ float inverse_softcap(const LogprobInput& p) {
  return p.softcap > 0.0f ? div_rn(1.0f, p.softcap) : 0.0f;
}
template <class T>
__device__ __forceinline__ const typename T::Storage* row_of(const LogprobInput& p, std::int64_t row) {
  return static_cast<const typename T::Storage*>(p.logits) + p.logits_rows.offset(row);
}

// z of the target, NaN where this shard does not hold it.
template <class T>
__device__ __forceinline__ float target_z(const LogprobInput& p, std::int64_t row, std::int64_t target) {
  const std::int64_t local = target - p.vocab_start;
  if (target < 0 || target >= p.valid_vocab || local < 0 || local >= p.num_columns) return canonical_nan();
  return scaled_logit(T::load(row_of<T>(p, row)[local]), p.logit_scale, p.softcap, inverse_softcap(p));
}

// The kept list of a row: [begin, end) of kept_ids; empty where the row is not restricted.
struct KeptRange {
  std::int64_t begin = 0, end = 0;
  bool bad = false;
  __device__ __forceinline__ bool restricts() const { return end > begin; }
};
__device__ __forceinline__ KeptRange kept_range(const LogprobInput& p, std::int64_t row) {
  if (!p.kept_offsets) return {};
  const std::int64_t begin = p.kept_offsets[row], end = p.kept_offsets[row + 1];
  if (begin < 0 || end < begin || end > p.kept_size) return {0, 0, true};
  return {begin, end, false};
}

// Marks the kept columns of [first, first + columns) in `bitmap`; true where an id is out of range. `threads` threads
// take part, this one is `thread`; the bitmap was cleared before.
__device__ __forceinline__ bool mark_kept(const LogprobInput& p, const KeptRange& kept, std::int64_t target,
                                          std::int64_t first, int columns, std::uint32_t* bitmap, int thread,
                                          int threads) {
  bool bad = false;
  for (std::int64_t i = kept.begin + thread; i < kept.end; i += threads) {
    const std::int64_t id = p.kept_ids[i];
    bad |= id < 0 || id >= p.valid_vocab;
    const std::int64_t column = id - first;
    if (column >= 0 && column < columns) atomicOr(&bitmap[column >> 5], 1u << (column & 31));
  }
  const std::int64_t column = target - first;
  if (thread == 0 && column >= 0 && column < columns) atomicOr(&bitmap[column >> 5], 1u << (column & 31));
  return bad;
}

// One leaf in shared memory. Sixteen-byte vectors are swizzled by the leaf index: lanes that read vector v of their own
// leaves, 256 or 512 bytes apart, hit different banks.
template <class T>
struct LeafTile {
  static constexpr int kVectors = kLeafColumns * static_cast<int>(sizeof(typename T::Storage)) / 16;
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(typename T::Storage));

  static __device__ __forceinline__ int vector_index(int leaf, int vector) {
    return leaf * kVectors + (vector ^ (leaf & 7));
  }
  static __device__ __forceinline__ typename T::Storage* element(uint4* group, int leaf, int column) {
    return reinterpret_cast<typename T::Storage*>(group + vector_index(leaf, column / kPerVector)) + column % kPerVector;
  }
  static __device__ __forceinline__ Octet<T> octet(const uint4* group, int leaf, int octet) {
    Octet<T> o;
#pragma unroll
    for (int i = 0; i < Octet<T>::kVectors; ++i) {
      o.v[i] = group[vector_index(leaf, octet * Octet<T>::kVectors + i)];
    }
    return o;
  }
};

// The eight chains of a leaf.
template <Exp kExp, bool kMoments>
struct Chains {
  float S[kNumChains], E[kNumChains], Q[kNumChains];

  __device__ __forceinline__ Chains() {
#pragma unroll
    for (int r = 0; r < kNumChains; ++r) S[r] = E[r] = Q[r] = 0.0f;
  }
  // addend: -m, or kStatsShift - m for the portable exponential.
  static __device__ __forceinline__ float addend(float m) {
    return kExp == Exp::kHardware ? -m : sub_rn(kStatsShift, m);
  }
  __device__ __forceinline__ void add(int r, float z, float c, float addend) {
    const float e = kExp == Exp::kHardware ? ex2_approx(fma_rn(z, c, addend)) : stat_exp_portable(z, c, addend);
    S[r] = add_rn(S[r], e);
    if constexpr (kMoments) {
      E[r] = fma_rn(e, z, E[r]);
      Q[r] = fma_rn(e, e, Q[r]);
    }
  }
  __device__ __forceinline__ SoftmaxStats total(float m) const {
    return {m, combine_chains(S), kMoments ? combine_chains(E) : 0.0f, kMoments ? combine_chains(Q) : 0.0f};
  }
};

// Largest and smallest of a leaf's first `octets` octets; the largest is NaN if any value is.
template <class T>
__device__ __forceinline__ void leaf_range(const uint4* group, int leaf, int octets, float* largest, float* smallest) {
  if constexpr (T::kPacked) {
    std::uint32_t high = 0, low = 0;
#pragma unroll
    for (int o = 0; o < kOctetsPerLeaf; ++o) {
      if (o < octets) {
        const uint4 v = LeafTile<T>::octet(group, leaf, o).v[0];
        if (o == 0) high = low = v.x;
        high = T::max2(T::max2(high, v.x), T::max2(v.y, T::max2(v.z, v.w)));
        low = T::min2(T::min2(low, v.x), T::min2(v.y, T::min2(v.z, v.w)));
      }
    }
    *largest = max_nan(T::low(high), T::high(high));
    *smallest = fminf(T::low(low), T::high(low));
  } else {
    float high = -infinity(), low = infinity();
#pragma unroll 4
    for (int o = 0; o < kOctetsPerLeaf; ++o) {
      if (o < octets) {
        float z[kOctet];
        LeafTile<T>::octet(group, leaf, o).to_float(z);
#pragma unroll
        for (int r = 0; r < kOctet; ++r) {
          high = max_nan(high, z[r]);
          low = fminf(low, z[r]);
        }
      }
    }
    *largest = high;
    *smallest = low;
  }
}

// Leaf of n columns whose logits are z as they stand, whole octets, none -Inf and none below the clamp.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats sum_leaf(const uint4* group, int leaf, int octets, float c, float m) {
  Chains<kExp, kMoments> chains;
  const float addend = chains.addend(m);
#pragma unroll 4
  for (int o = 0; o < kOctetsPerLeaf; ++o) {
    if (o < octets) {
      float z[kOctet];
      LeafTile<T>::octet(group, leaf, o).to_float(z);
#pragma unroll
      for (int r = 0; r < kOctet; ++r) chains.add(r, z[r], c, addend);
    }
  }
  return chains.total(m);
}

// Any leaf: scaled, softcapped, clamped, with -Inf columns, of n columns.
template <class T, Exp kExp, bool kMoments>
__device__ __noinline__ SoftmaxStats general_leaf(const uint4* group, int leaf, int n, float c, float logit_scale,
                                                  float softcap) {
  const float inverse = softcap > 0.0f ? div_rn(1.0f, softcap) : 0.0f;
  float largest = -infinity();
  for (int o = 0; o * kOctet < n; ++o) {
    float z[kOctet];
    LeafTile<T>::octet(group, leaf, o).to_float(z);
#pragma unroll
    for (int r = 0; r < kOctet; ++r) {
      if (o * kOctet + r < n) largest = max_nan(largest, scaled_logit(z[r], logit_scale, softcap, inverse));
    }
  }
  SoftmaxStats stats;
  const LeafReference reference = leaf_reference(c, largest, &stats);
  if (!reference.usable) return stats;
  Chains<kExp, kMoments> chains;
  const float addend = chains.addend(reference.m);
  for (int o = 0; o * kOctet < n; ++o) {
    float z[kOctet];
    LeafTile<T>::octet(group, leaf, o).to_float(z);
#pragma unroll
    for (int r = 0; r < kOctet; ++r) {
      const float s = scaled_logit(z[r], logit_scale, softcap, inverse);
      if (o * kOctet + r < n && s > -infinity()) chains.add(r, s > reference.q ? s : reference.q, c, addend);
    }
  }
  return chains.total(reference.m);
}

template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats leaf_stats(const uint4* group, int leaf, int n, float c, float logit_scale,
                                                   float softcap) {
  if (n <= 0) return identity_stats();
  const bool plain = n % kOctet == 0 && logit_scale == 1.0f && softcap == 0.0f;
  if (plain) {
    float largest, smallest;
    leaf_range<T>(group, leaf, n / kOctet, &largest, &smallest);
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c, largest, &stats);
    if (!reference.usable) return stats;
    if (smallest >= reference.q && smallest > -infinity()) {
      return sum_leaf<T, kExp, kMoments>(group, leaf, n / kOctet, c, reference.m);
    }
  }
  return general_leaf<T, kExp, kMoments>(group, leaf, n, c, logit_scale, softcap);
}

__device__ __forceinline__ SoftmaxStats shuffle_xor(const SoftmaxStats& s, int distance, bool moments) {
  SoftmaxStats o{__shfl_xor_sync(kAllLanes, s.m, distance), __shfl_xor_sync(kAllLanes, s.S, distance), 0.0f, 0.0f};
  if (moments) {
    o.E = __shfl_xor_sync(kAllLanes, s.E, distance);
    o.Q = __shfl_xor_sync(kAllLanes, s.Q, distance);
  }
  return o;
}

// Perfect binary tree over the lanes; every lane gets the root.
template <bool kMoments>
__device__ __forceinline__ SoftmaxStats tree_over_lanes(SoftmaxStats s) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) s = combine(s, shuffle_xor(s, distance, kMoments));
  return s;
}

// Root of `count` nodes, a power of two up to 1024, read by `load(index)`.
template <bool kMoments, class Load>
__device__ __forceinline__ SoftmaxStats tree_over_nodes(int count, int lane, Load load) {
  if (count <= kWarp) return tree_over_lanes<kMoments>(lane < count ? load(lane) : identity_stats());
  SoftmaxStats mine = identity_stats();
  for (int i = 0; i < count / kWarp; ++i) {
    const SoftmaxStats s = tree_over_lanes<kMoments>(load(i * kWarp + lane));
    if (lane == i) mine = s;
  }
  return tree_over_lanes<kMoments>(mine);
}

template <class T>
__device__ __forceinline__ void load_group(const typename T::Storage* source, int columns, uint4* group, int lane) {
  constexpr int kVectors = LeafTile<T>::kVectors, kPerVector = LeafTile<T>::kPerVector;
  if (reinterpret_cast<std::uintptr_t>(source) % 16 == 0) {
    const std::uint32_t base = shared_address(group);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * kWarp + lane;
      const int left = (columns - vector * kPerVector) * static_cast<int>(sizeof(typename T::Storage));
      if (left > 0) {
        copy_async_16(base + 16 * LeafTile<T>::vector_index(vector / kVectors, vector % kVectors),
                      source + vector * kPerVector, left < 16 ? left : 16);
      }
    }
    copy_async_wait_all();
  } else {
#pragma unroll 8
    for (int column = lane; column < columns; column += kWarp) {
      *LeafTile<T>::element(group, column / kLeafColumns, column % kLeafColumns) = source[column];
    }
  }
  __syncwarp();
}

// Turns the columns of a group that are not kept into -Inf.
template <class T>
__device__ __forceinline__ void drop_columns(uint4* group, int leaf, const std::uint32_t* bitmap) {
  const typename T::Storage minus_infinity = T::store(-infinity());
  for (int o = 0; o < kOctetsPerLeaf; ++o) {
    const std::uint32_t keep = bitmap[leaf * (kLeafColumns / 32) + o / 4] >> (o % 4 * 8) & 0xffu;
    for (int r = 0; r < kOctet; ++r) {
      if (!(keep >> r & 1)) *LeafTile<T>::element(group, leaf, o * kOctet + r) = minus_infinity;
    }
  }
}

// Node of one group. `group_memory`: kGroupBytes<T>, `bitmap`: kKeptWords where the call restricts rows.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats group_stats(const LogprobInput& p, std::int64_t row, std::int64_t target,
                                                    int part, int group_index, uint4* group_memory,
                                                    std::uint32_t* bitmap, int lane) {
  const std::int64_t first = part_cut(p.vocab_size, part) + std::int64_t{group_index} * kGroupColumns;
  std::int64_t last = part_cut(p.vocab_size, part + 1);
  if (last > p.valid_vocab) last = p.valid_vocab;
  if (last > first + kGroupColumns) last = first + kGroupColumns;
  const int columns = last > first ? static_cast<int>(last - first) : 0;

  const float temperature = temperature_of(p, row);
  const KeptRange kept = kept_range(p, row);
  std::int32_t failed = (is_temperature(temperature) ? 0 : kBadTemperature) | (kept.bad ? kBadKept : 0);
  if (kept.restricts()) {
    for (int i = lane; i < kKeptWords; i += kWarp) bitmap[i] = 0;
    __syncwarp();
    const bool bad = mark_kept(p, kept, target, first, columns, bitmap, lane, kWarp);
    if (__any_sync(kAllLanes, bad)) failed |= kBadKept;
  }
  if (failed) return failed_stats(failed);

  load_group<T>(row_of<T>(p, row) + (first - p.vocab_start), columns, group_memory, lane);
  if (kept.restricts()) {
    drop_columns<T>(group_memory, lane, bitmap);
    __syncwarp();
  }
  const int n = columns - lane * kLeafColumns;
  const SoftmaxStats stats = leaf_stats<T, kExp, kMoments>(group_memory, lane, n < kLeafColumns ? n : kLeafColumns,
                                                           log2_scale(temperature), p.logit_scale, p.softcap);
  return tree_over_lanes<kMoments>(stats);
}

// Writes what was asked for of row `row`; one thread.
__device__ __forceinline__ void write_outputs(const LogprobParams& p, std::int64_t row, const SoftmaxStats& root,
                                              float target_z) {
  if (p.stats) {
    float* s = p.stats + row * kStatsFields;
    s[0] = root.m, s[1] = root.S, s[2] = root.E, s[3] = root.Q, s[4] = target_z;
    return;
  }
  const LogprobOutputs o = logprob_outputs(root, target_z, temperature_of(p, row));
  if (p.logprob) p.logprob[row] = o.logprob;
  if (p.lse) p.lse[row] = o.lse;
  if (p.entropy) p.entropy[row] = o.entropy;
  if (p.sum_p_sq) p.sum_p_sq[row] = o.sum_p_sq;
  if (p.status) p.status[row] = o.status;
}

}  // namespace rlk::cuda
