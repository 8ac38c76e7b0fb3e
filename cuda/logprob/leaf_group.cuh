// Statistics of up to 32 leaves of one row by one warp: load through shared memory, one lane a leaf, tree by shuffles.
// Shared by the sm_80 and sm_90 kernels, which differ in how they carry the groups' nodes to the root.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/element.cuh"
#include "../common/kernel_memory.h"
#include "group_grid.h"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kGroupLeaves == kWarp);
constexpr int kOctetsPerLeaf = kLeafColumns / kOctet;
constexpr int kKeptWords = kGroupColumns / 32;  // bitmap of a group's kept columns

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

// Calls mark(column id) for this thread's share of a kept list and for the target, which is always kept; true where an
// id is out of range.
template <class Mark>
__device__ __forceinline__ bool scan_kept(const LogprobInput& p, const KeptRange& kept, std::int64_t target, int thread,
                                          int threads, Mark mark) {
  bool bad = false;
  for (std::int64_t i = kept.begin + thread; i < kept.end; i += threads) {
    const std::int64_t id = p.kept_ids[i];
    bad |= id < 0 || id >= p.valid_vocab;
    mark(id);
  }
  if (thread == 0) mark(target);
  return bad;
}

// Leaves in shared memory, one 16-byte vector of padding after each: lanes that read vector v of their own leaves, 272 or
// 528 bytes apart, hit different banks.
template <class T>
struct LeafTile {
  static constexpr int kVectors = kLeafColumns * static_cast<int>(sizeof(typename T::Storage)) / 16;
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(typename T::Storage));
  static constexpr int kPitch = kVectors + 1;

  static __device__ __forceinline__ typename T::Storage* element(uint4* group, int leaf, int column) {
    return reinterpret_cast<typename T::Storage*>(group + leaf * kPitch) + column;
  }
  static __device__ __forceinline__ Octet<T> octet(const uint4* group, int leaf, int octet) {
    Octet<T> o;
#pragma unroll
    for (int i = 0; i < Octet<T>::kVectors; ++i) o.v[i] = group[leaf * kPitch + octet * Octet<T>::kVectors + i];
    return o;
  }
};

template <class T>
constexpr int kGroupBytes = kGroupLeaves* LeafTile<T>::kPitch * 16;

// Starts copying up to kGroupColumns neighbouring columns into leaf tiles. Asynchronous where the source is aligned to
// 16 or 4 bytes; a 2-byte type at an odd element is shifted through registers.
template <class T>
__device__ __forceinline__ void start_columns(const typename T::Storage* source, int columns, uint4* group, int lane) {
  constexpr int kVectors = LeafTile<T>::kVectors, kPerVector = LeafTile<T>::kPerVector, kPitch = LeafTile<T>::kPitch;
  constexpr int kSize = static_cast<int>(sizeof(typename T::Storage));
  const auto address = reinterpret_cast<std::uintptr_t>(source);
  const std::uint32_t base = shared_address(group);
  if (address % 16 == 0) {
    constexpr int kStep = kWarp / kVectors * kPitch * 16;  // bytes of tile that the warp's 32 vectors span
    const std::uint32_t mine = base + 16 * (lane / kVectors * kPitch + lane % kVectors);
    const typename T::Storage* from = source + lane * kPerVector;
    if (columns == kGroupColumns) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) copy_async_16(mine + i * kStep, from + i * kWarp * kPerVector, 16);
    } else {
      int left = (columns - lane * kPerVector) * kSize;
#pragma unroll 2
      for (int i = 0; left > 0; ++i, left -= kWarp * 16) {
        copy_async_16(mine + i * kStep, from + i * kWarp * kPerVector, left < 16 ? left : 16);
      }
    }
    return;
  }
  constexpr int kPerWord = 4 / kSize;
  const auto word_address = [&](int word) {  // of the tile's 4-byte word that holds columns word * kPerWord ...
    return base + word * kPerWord / kLeafColumns * (kPitch * 16) + word * kPerWord % kLeafColumns * kSize;
  };
  const int words = columns / kPerWord;
  if (address % 4 == 0) {
#pragma unroll 4
    for (int word = lane; word < words; word += kWarp) copy_async_4(word_address(word), source + word * kPerWord);
  } else if constexpr (kSize == 2) {
    const auto* from = reinterpret_cast<const std::uint32_t*>(source - 1);
#pragma unroll 8
    for (int word = lane; word < words; word += kWarp) {
      const std::uint32_t value = __funnelshift_r(from[word], std::uint32_t{source[2 * word + 1]}, 16);
      store_shared(word_address(word), value);
    }
  }
  if (kPerWord == 2 && columns % 2 != 0 && lane == 0) {
    *LeafTile<T>::element(group, (columns - 1) / kLeafColumns, (columns - 1) % kLeafColumns) = source[columns - 1];
  }
}

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
  // One octet. `present` is 1, or 0 for an octet past the leaf's end, whose values then leave no trace: a product with
  // 1 and a sum with 0 are exact.
  __device__ __forceinline__ void add_octet(const float (&z)[kOctet], float c, float addend, float present) {
#pragma unroll
    for (int r = 0; r < kNumChains; ++r) {
      float e = kExp == Exp::kHardware ? ex2_approx(fma_rn(z[r], c, addend)) : stat_exp_portable(z[r], c, addend);
      if constexpr (kMoments) {
        e = mul_rn(e, present);
        S[r] = add_rn(S[r], e);
        E[r] = fma_rn(e, z[r], E[r]);
        Q[r] = fma_rn(e, e, Q[r]);
      } else {
        S[r] = fma_rn(e, present, S[r]);
      }
    }
  }
  __device__ __forceinline__ SoftmaxStats total(float m) const {
    return {m, combine_chains(S), kMoments ? combine_chains(E) : 0.0f, kMoments ? combine_chains(Q) : 0.0f};
  }
};

// Largest and smallest of a whole leaf; the largest is NaN if any value is.
struct Range {
  float largest, smallest;
};
template <class T>
struct RangeOf {  // of values packed two to a word
  std::uint32_t high, low;
  __device__ __forceinline__ void begin(const Octet<T>& x) { high = low = x.v[0].x; }
  __device__ __forceinline__ void add(const Octet<T>& x) {
    const uint4& v = x.v[0];
    high = T::max2(T::max2(high, v.x), T::max2(v.y, T::max2(v.z, v.w)));
    low = T::min2(T::min2(low, v.x), T::min2(v.y, T::min2(v.z, v.w)));
  }
  __device__ __forceinline__ Range range() const {
    return {max_nan(T::low(high), T::high(high)), fminf(T::low(low), T::high(low))};
  }
};
template <>
struct RangeOf<Fp32> {
  float high, low;
  __device__ __forceinline__ void begin(const Octet<Fp32>&) { high = -infinity(), low = infinity(); }
  __device__ __forceinline__ void add(const Octet<Fp32>& x) {
    float z[kOctet];
    x.to_float(z);
#pragma unroll
    for (int r = 0; r < kOctet; ++r) {
      high = max_nan(high, z[r]);
      low = fminf(low, z[r]);
    }
  }
  __device__ __forceinline__ Range range() const { return {high, low}; }
};

// Any leaf, from shared memory: scaled, softcapped, clamped, with -Inf columns, of n columns.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats general_leaf(const uint4* group, int leaf, int n, float c, float logit_scale,
                                                     float softcap) {
  const float inverse = softcap > 0.0f ? div_rn(1.0f, softcap) : 0.0f;
  float largest = -infinity();
#pragma unroll 1
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
#pragma unroll 1
  for (int o = 0; o * kOctet < n; ++o) {
    float z[kOctet];
    LeafTile<T>::octet(group, leaf, o).to_float(z);
#pragma unroll
    for (int r = 0; r < kOctet; ++r) {
      const float s = scaled_logit(z[r], logit_scale, softcap, inverse);
      if (o * kOctet + r >= n || s == -infinity()) continue;
      const float clamped = s > reference.q ? s : reference.q;
      const float e =
          kExp == Exp::kHardware ? ex2_approx(fma_rn(clamped, c, addend)) : stat_exp_portable(clamped, c, addend);
      chains.S[r] = add_rn(chains.S[r], e);
      if constexpr (kMoments) {
        chains.E[r] = fma_rn(e, clamped, chains.E[r]);
        chains.Q[r] = fma_rn(e, e, chains.Q[r]);
      }
    }
  }
  return chains.total(reference.m);
}

// Copies a leaf's first octet over its missing ones: the loops below then need no bounds. Their repeats change neither the
// largest nor the smallest value and are dropped from the sums.
template <class T>
__device__ __forceinline__ void repeat_first_octet(uint4* group, int leaf, int octets) {
  const Octet<T> first = LeafTile<T>::octet(group, leaf, 0);
#pragma unroll 1
  for (int o = octets; o < kOctetsPerLeaf; ++o) {
#pragma unroll
    for (int i = 0; i < Octet<T>::kVectors; ++i) {
      group[leaf * LeafTile<T>::kPitch + o * Octet<T>::kVectors + i] = first.v[i];
    }
  }
}

// One lane's leaf. The common one, whole octets of logits that are z as they stand, none -Inf and none below the clamp,
// takes the short loop.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats leaf_stats(uint4* group, int leaf, int n, float c, float logit_scale,
                                                   float softcap) {
  if (n <= 0) return identity_stats();
  if (n % kOctet == 0 && logit_scale == 1.0f && softcap == 0.0f) {
    const int octets = n / kOctet;
    if (octets < kOctetsPerLeaf) repeat_first_octet<T>(group, leaf, octets);
    RangeOf<T> range_of;
#pragma unroll(T::kPacked ? kOctetsPerLeaf : 4)
    for (int o = 0; o < kOctetsPerLeaf; ++o) {
      const Octet<T> x = LeafTile<T>::octet(group, leaf, o);
      if (o == 0) range_of.begin(x);
      range_of.add(x);
    }
    const Range range = range_of.range();
    const float m = add_rn(ceil_of(mul_rn(c, range.largest)), 0.0f);
    // Well inside the bounds of leaf_reference, so that nothing is clamped, missing or failed, without q's division.
    if (abs_of(m) < 0.5f * kStatsRange && fma_rn(range.smallest, c, -m) >= 1.0f - kStatsFloor) {
      Chains<kExp, kMoments> chains;
      const float addend = chains.addend(m);
#pragma unroll 4
      for (int o = 0; o < kOctetsPerLeaf; ++o) {
        float z[kOctet];
        LeafTile<T>::octet(group, leaf, o).to_float(z);
        chains.add_octet(z, c, addend, o < octets ? 1.0f : 0.0f);
      }
      return chains.total(m);
    }
  }
  return general_leaf<T, kExp, kMoments>(group, leaf, n, c, logit_scale, softcap);
}

__device__ __forceinline__ float shuffle_xor(float x, int distance) { return __shfl_xor_sync(kAllLanes, x, distance); }

// Within these bounds no rescaled value, sum or cancellation of 32 nodes leaves fp32's normal range, so rescaling all
// nodes to the largest reference at once gives the bits of rescaling pair by pair.
constexpr int kTreeGap = 30;
__device__ __forceinline__ bool in_tree_range(float x) {
  const float magnitude = abs_of(x);
  return bits_of(x) == 0 || (magnitude >= 0x1p-40f && magnitude <= 0x1p+90f);
}

// Perfect binary tree over the lanes; every lane gets the root.
template <bool kMoments>
__device__ __forceinline__ SoftmaxStats tree_over_lanes(SoftmaxStats s) {
  // A node's reference as an integer: |m| < 2^21; the identity lies far below, a failed row (NaN) far above.
  constexpr int kIdentity = -(1 << 28), kFailed = 1 << 28;
  const int m = is_nan(s.m) ? kFailed : s.m == -infinity() ? kIdentity : static_cast<int>(s.m);
  const int largest = __reduce_max_sync(kAllLanes, m);
  const int gap = m - largest;
  bool simple = m == kIdentity || gap >= -kTreeGap;
  if constexpr (kMoments) simple = simple && in_tree_range(s.E);
  if (__all_sync(kAllLanes, simple) && largest < kFailed && largest > kIdentity) {
    const float factor = m == kIdentity ? 0.0f : float_of((127 + gap) << 23);
    SoftmaxStats root{static_cast<float>(largest), mul_rn(s.S, factor), 0.0f, 0.0f};
    if constexpr (kMoments) {
      root.E = mul_rn(s.E, factor);
      root.Q = mul_rn(s.Q, mul_rn(factor, factor));
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      root.S = add_rn(root.S, shuffle_xor(root.S, distance));
      if constexpr (kMoments) {
        root.E = add_rn(root.E, shuffle_xor(root.E, distance));
        root.Q = add_rn(root.Q, shuffle_xor(root.Q, distance));
      }
    }
    return root;
  }
#pragma unroll 1
  for (int distance = 1; distance < kWarp; distance *= 2) {
    SoftmaxStats other{shuffle_xor(s.m, distance), shuffle_xor(s.S, distance), 0.0f, 0.0f};
    if constexpr (kMoments) {
      other.E = shuffle_xor(s.E, distance);
      other.Q = shuffle_xor(s.Q, distance);
    }
    s = combine(s, other);
  }
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

// Columns of one lane's leaf in a group.
struct LeafSpan {
  int first;    // global column
  int columns;  // 0..128
};
__device__ __forceinline__ LeafSpan leaf_span(const GroupGrid& grid, int group, int lane) {
  unsigned part, leaf;
  if (grid.groups_per_part > 0) {
    part = static_cast<unsigned>(group) / static_cast<unsigned>(grid.groups_per_part);
    leaf = (group - part * grid.groups_per_part) * kGroupLeaves + lane;
  } else {
    part = static_cast<unsigned>(lane) / static_cast<unsigned>(grid.leaves);
    leaf = lane - part * grid.leaves;
    if (part >= static_cast<unsigned>(grid.parts_per_group)) return {0, 0};
    part += group * grid.parts_per_group;
  }
  const int first = grid.part_first[part] + static_cast<int>(leaf) * kLeafColumns;
  const int columns = grid.part_last[part] - first;
  return {first, columns <= 0 ? 0 : columns < kLeafColumns ? columns : kLeafColumns};
}

// Starts the copy of a group into shared memory: a stretch of columns per part. The caller commits it.
template <class T>
__device__ __forceinline__ void start_group(const LogprobInput& p, const GroupGrid& grid, std::int64_t row,
                                            const LeafSpan& span, uint4* group, int lane) {
  const auto* logits = row_of<T>(p, row);
  if (grid.groups_per_part > 0) {
    const int first = __shfl_sync(kAllLanes, span.first, 0);
    const auto columns = static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(span.columns)));
    start_columns<T>(logits + (first - p.vocab_start), columns, group, lane);
  } else {
    for (int part = 0; part < grid.parts_per_group; ++part) {
      const int leader = part * grid.leaves;
      const int first = __shfl_sync(kAllLanes, span.first, leader);
      const int mine = lane >= leader && lane < leader + grid.leaves ? span.columns : 0;
      const auto columns = static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(mine)));
      start_columns<T>(logits + (first - p.vocab_start), columns, group + leader * LeafTile<T>::kPitch, lane);
    }
  }
}

// Index of a group's node among the row's nodes, and the reverse: false for padding.
__device__ __forceinline__ int node_of_group(const GroupGrid& grid, int group) {
  if (grid.groups_per_part == 0) return group;
  const int part = group / grid.groups_per_part;
  return part * (grid.leaves / kGroupLeaves) + group - part * grid.groups_per_part;
}
__device__ __forceinline__ bool is_group_node(const GroupGrid& grid, int node) {
  return grid.groups_per_part == 0 || node % (grid.leaves / kGroupLeaves) < grid.groups_per_part;
}

// Turns the columns of a leaf that are not kept into -Inf.
template <class T>
__device__ __forceinline__ void drop_columns(uint4* group, int leaf, int columns, const std::uint32_t* keep) {
  const typename T::Storage minus_infinity = T::store(-infinity());
  for (int column = 0; column < columns; ++column) {
    if (!(keep[column >> 5] >> (column & 31) & 1)) *LeafTile<T>::element(group, leaf, column) = minus_infinity;
  }
}

// Marks the kept columns of a group's leaves, lane l's leaf in words [4 l, 4 l + 4) of `bitmap`; true in some lane where
// an id is out of range.
__device__ __forceinline__ bool mark_kept(const LogprobInput& p, const GroupGrid& grid, const KeptRange& kept,
                                          std::int64_t target, const LeafSpan& span, std::uint32_t* bitmap, int lane) {
  if (grid.groups_per_part > 0) {  // one stretch of columns: the lanes share the list
    const int first = __shfl_sync(kAllLanes, span.first, 0);
    const int columns = static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(span.columns)));
    return scan_kept(p, kept, target, lane, kWarp, [&](std::int64_t id) {
      const std::int64_t column = id - first;
      if (column >= 0 && column < columns) atomicOr(&bitmap[column >> 5], 1u << (column & 31));
    });
  }
  std::uint32_t* keep = bitmap + lane * (kLeafColumns / 32);
  return scan_kept(p, kept, target, 0, 1, [&](std::int64_t id) {  // a small vocabulary: each lane for its own leaf
    const std::int64_t column = id - span.first;
    if (column >= 0 && column < span.columns) keep[column >> 5] |= 1u << (column & 31);
  });
}

// What a row's groups need to know of it.
struct RowHead {
  std::int64_t target;
  float c;  // log2e / temperature
  KeptRange kept;
  std::int32_t failed;  // status bits known before a logit is read
};
__device__ __forceinline__ RowHead row_head(const LogprobInput& p, std::int64_t row) {
  const float temperature = temperature_of(p, row);
  const KeptRange kept = kept_range(p, row);
  return {target_of(p, row), log2_scale(temperature), kept,
          (is_temperature(temperature) ? 0 : kBadTemperature) | (kept.bad ? kBadKept : 0)};
}

// Statistics of one group whose logits lie in `group_memory`, each lane's leaf in its own tile. `bitmap`: kKeptWords
// where the call restricts rows.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats group_stats(const LogprobInput& p, const GroupGrid& grid, const RowHead& head,
                                                    const LeafSpan& span, uint4* group_memory, std::uint32_t* bitmap,
                                                    int lane) {
  std::int32_t failed = head.failed;
  if (head.kept.restricts()) {
    std::uint32_t* keep = bitmap + lane * (kLeafColumns / 32);
    for (int i = 0; i < kLeafColumns / 32; ++i) keep[i] = 0;
    __syncwarp();
    const bool bad = mark_kept(p, grid, head.kept, head.target, span, bitmap, lane);
    if (__any_sync(kAllLanes, bad)) failed |= kBadKept;
    drop_columns<T>(group_memory, lane, span.columns, keep);
  }
  const SoftmaxStats stats =
      leaf_stats<T, kExp, kMoments>(group_memory, lane, span.columns, head.c, p.logit_scale, p.softcap);
  return failed ? failed_stats(failed) : tree_over_lanes<kMoments>(stats);
}

// Writes what was asked for of row `row`; one thread.
__device__ __forceinline__ void write_outputs(const LogprobParams& p, std::int64_t row, const SoftmaxStats& root,
                                              float target_z) {
  if (p.stats) return store_stats(root, target_z, p.stats + row * kStatsFields);
  const LogprobOutputs o = logprob_outputs(root, target_z, temperature_of(p, row));
  if (p.logprob) p.logprob[row] = o.logprob;
  if (p.lse) p.lse[row] = o.lse;
  if (p.entropy) p.entropy[row] = o.entropy;
  if (p.sum_p_sq) p.sum_p_sq[row] = o.sum_p_sq;
  if (p.status) p.status[row] = o.status;
}
__device__ __forceinline__ void write_ignored(const LogprobParams& p, std::int64_t row) {
  write_outputs(p, row, identity_stats(), infinity());
}

}  // namespace rlk::cuda
