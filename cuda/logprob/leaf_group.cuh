// Statistics of up to 32 leaves of one row by one warp: load through shared memory, one lane a leaf, tree by shuffles.
// Shared by the sm_80 and sm_90 kernels, which differ in how they carry the groups' nodes to the root.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "group_grid.h"
#include "leaf.cuh"
#include "row.cuh"

namespace rlk::cuda {

static_assert(kGroupLeaves == kWarp);
constexpr int kKeptWords = kGroupColumns / 32;  // bitmap of a group's kept columns
constexpr int kKeptWordsPerLeaf = kLeafColumns / 32;

template <class T>
constexpr int kGroupBytes = kGroupLeaves* LeafTile<T>::kPitch * 16;

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

// One lane's leaf in a group.
struct LeafSpan {
  int first;  // global column
  int left;   // columns from there to the part's end; negative past it
  __device__ __forceinline__ int columns() const { return left < 0 ? 0 : left < kLeafColumns ? left : kLeafColumns; }
  __device__ __forceinline__ void next_group() {
    first += kGroupColumns;
    left -= kGroupColumns;
  }
};
// Of group `step` of part `task` where parts are long, of group `task` where a group holds several parts.
__device__ __forceinline__ LeafSpan leaf_span(const GroupGrid& grid, int task, int step, int lane) {
  int part = task, leaf = step * kGroupLeaves + lane;
  if (grid.groups_per_part == 0) {
    const int mine = static_cast<unsigned>(lane) / static_cast<unsigned>(grid.leaves);
    if (mine >= grid.parts_per_group) return {0, 0};
    part = task * grid.parts_per_group + mine;
    leaf = lane - mine * grid.leaves;
  }
  const int first = grid.part_first[part] + leaf * kLeafColumns;
  return {first, grid.part_last[part] - first};
}
__device__ __forceinline__ LeafSpan leaf_span(const GroupGrid& grid, int group, int lane) {
  if (grid.groups_per_part == 0) return leaf_span(grid, group, 0, lane);
  const int part = static_cast<unsigned>(group) / static_cast<unsigned>(grid.groups_per_part);
  return leaf_span(grid, part, group - part * grid.groups_per_part, lane);
}

// Bytes between the 16-byte vector that holds a row's first column and that column. Leaves begin at multiples of 8
// columns, so it is the same for all of the row's.
template <class T>
__device__ __forceinline__ int shift_of(const typename T::Storage* row) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 16);
}

// Starts copying neighbouring columns, whole vectors of them, into the leaf tiles at `tile`. Nothing past the last one
// is read; up to `shift` bytes before the first one are, of its own vector. Each of the warp's rounds is of whole
// 128-byte lines of the source, wherever it begins: a line that two of them share would come twice.
template <class T>
__device__ __forceinline__ void start_stretch(const typename T::Storage* source, int columns, uint4* tile, int lane) {
  using Tile = LeafTile<T>;
  constexpr int kLine = 128, kRound = kWarp * 16;                    // bytes
  constexpr int kStep = kWarp * Tile::kPitch * 16 / Tile::kVectors;  // bytes of tile that a round fills
  const int shift = shift_of<T>(source);
  const int bytes = shift + columns * static_cast<int>(sizeof(typename T::Storage));
  const char* vectors = reinterpret_cast<const char*>(source) - shift;
  const int skew =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(source) % kLine / 16);  // vectors before it in its line
  const int first = lane - skew;                                                // this lane's in round 0
  const char* from = vectors + first * 16;
  const std::uint32_t to =
      shared_address(tile) +
      ((first & -Tile::kVectors) / Tile::kVectors * Tile::kPitch + (first & (Tile::kVectors - 1))) * 16;
  if (bytes >= Tile::kVectors * kRound) {
    if (first >= 0) copy_async_16(to, from);
#pragma unroll
    for (int i = 1; i < Tile::kVectors; ++i) copy_async_16(to + i * kStep, from + i * kRound);
    if (first < 0) copy_async_16(to + Tile::kVectors * kStep, from + Tile::kVectors * kRound);
  } else {
    const int left = bytes - first * 16;
#pragma unroll
    for (int i = 0; i <= Tile::kVectors; ++i) {
      if ((i > 0 || first >= 0) && left >= i * kRound + 16) copy_async_16(to + i * kStep, from + i * kRound);
    }
    // The last one, unless it is not whole because the stretch begins inside a vector and ends with a leaf.
    const int last = bytes / 16, round = (last + skew) / kWarp;
    const bool in_leaf = last < (columns + kLeafColumns - 1) / kLeafColumns * Tile::kVectors;
    if (bytes % 16 != 0 && in_leaf && lane == (last + skew) % kWarp) {
      copy_async_16(to + round * kStep, from + round * kRound, bytes % 16);
    }
  }
  if (shift != 0) {  // each leaf ends inside the vector where the next one begins
    const int there = bytes - (lane + 1) * Tile::kBytes;
    if (there > 0) {
      copy_async_16(shared_address(tile + lane * Tile::kPitch + Tile::kVectors), vectors + (lane + 1) * Tile::kBytes,
                    there < 16 ? there : 16);
    }
  }
}

// Starts the copy of a group into shared memory: a stretch of columns per part. `row` is where global column 0 would
// be. The caller commits it.
template <class T>
__device__ __forceinline__ void start_group(const typename T::Storage* row, const GroupGrid& grid, const LeafSpan& span,
                                            uint4* tiles, int lane) {
  if (grid.groups_per_part > 0) {
    const int left = span.left + lane * kLeafColumns;  // from the group's first column
    const int first = span.first - lane * kLeafColumns;
    if (left > 0) start_stretch<T>(row + first, left < kGroupColumns ? left : kGroupColumns, tiles, lane);
    return;
  }
#pragma unroll 1
  for (int part = 0; part < grid.parts_per_group; ++part) {
    const int leader = part * grid.leaves;
    const int first = __shfl_sync(kAllLanes, span.first, leader);
    const int left = __shfl_sync(kAllLanes, span.left, leader);
    if (left > 0) start_stretch<T>(row + first, left, tiles + leader * LeafTile<T>::kPitch, lane);
  }
}

// Index of a group's node among the row's nodes, and the reverse: false for padding.
__device__ __forceinline__ int node_of_group(const GroupGrid& grid, int group) {
  if (grid.groups_per_part == 0) return group;
  const int part = group / grid.groups_per_part;
  return part * (grid.leaves / kGroupLeaves) + group - part * grid.groups_per_part;
}
__device__ __forceinline__ int group_of_node(const GroupGrid& grid, int node) {
  if (grid.groups_per_part == 0) return node;
  const int pitch = grid.leaves / kGroupLeaves, part = static_cast<unsigned>(node) / static_cast<unsigned>(pitch);
  return part * grid.groups_per_part + node - part * pitch;
}
__device__ __forceinline__ bool is_group_node(const GroupGrid& grid, int node) {
  return grid.groups_per_part == 0 || node % (grid.leaves / kGroupLeaves) < grid.groups_per_part;
}

// Turns the columns of a leaf that are not kept into -Inf.
template <class T>
__device__ __forceinline__ void drop_columns(uint4* leaf, int columns, const std::uint32_t* keep) {
  const typename T::Storage minus_infinity = T::store(-infinity());
#pragma unroll 1
  for (int column = 0; column < columns; ++column) {
    if (!(keep[column >> 5] >> (column & 31) & 1)) *LeafTile<T>::element(leaf, column) = minus_infinity;
  }
}

// Marks the kept columns of a group's leaves, lane l's leaf in words [4 l, 4 l + 4) of `bitmap`; true in some lane
// where an id is out of range.
__device__ __forceinline__ bool mark_kept(const LogprobInput& p, const GroupGrid& grid, const KeptRange& kept,
                                          std::int64_t target, const LeafSpan& span, std::uint32_t* bitmap, int lane) {
  if (grid.groups_per_part > 0) {  // one stretch of columns: the lanes share the list
    const int first = __shfl_sync(kAllLanes, span.first, 0);
    const int columns = static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(span.columns())));
    return scan_kept(p, kept, target, lane, kWarp, [&](std::int64_t id) {
      const std::int64_t column = id - first;
      if (column >= 0 && column < columns) atomicOr(&bitmap[column >> 5], 1u << (column & 31));
    });
  }
  std::uint32_t* keep = bitmap + lane * kKeptWordsPerLeaf;
  return scan_kept(p, kept, target, 0, 1, [&](std::int64_t id) {  // a small vocabulary: each lane for its own leaf
    const std::int64_t column = id - span.first;
    if (column >= 0 && column < span.columns()) keep[column >> 5] |= 1u << (column & 31);
  });
}

// Restricts a group to its row's kept set; status bits where that is bad. `bitmap` has kKeptWords.
template <class T>
__device__ __forceinline__ std::int32_t restrict_group(const LogprobInput& p, const GroupGrid& grid, std::int64_t row,
                                                       std::int64_t target, const LeafSpan& span, uint4* leaf,
                                                       std::uint32_t* bitmap, int lane) {
  const KeptRange kept = kept_range(p, row);
  if (kept.bad) return kBadKept;
  if (!kept.restricts()) return 0;
  std::uint32_t* keep = bitmap + lane * kKeptWordsPerLeaf;
  for (int i = 0; i < kKeptWordsPerLeaf; ++i) keep[i] = 0;
  __syncwarp();
  const bool bad = mark_kept(p, grid, kept, target, span, bitmap, lane);
  const std::int32_t status = __any_sync(kAllLanes, bad) ? kBadKept : 0;
  __syncwarp();
  drop_columns<T>(leaf, span.columns(), keep);
  return status;
}

// What a row's groups need to know of it.
struct RowHead {
  std::int64_t row, target;
  float c;              // log2e / temperature
  std::int32_t failed;  // status bits known before a logit is read
};
__device__ __forceinline__ RowHead row_head(std::int64_t row, std::int64_t target, float temperature) {
  return {row, target, log2_scale(temperature), is_temperature(temperature) ? 0 : kBadTemperature};
}

// One lane's leaf of a group whose logits lie in `tiles`, copied from `shift` bytes before them; its tree is to follow.
// The group's status bits go into `failed`. `bitmap`: kKeptWords where the call restricts rows.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats leaf_of_group(const LogprobInput& p, const GroupGrid& grid, const RowHead& head,
                                                      const LeafSpan& span, uint4* tiles, int shift,
                                                      std::uint32_t* bitmap, std::int32_t* failed, int lane) {
  uint4* leaf = tiles + lane * LeafTile<T>::kPitch;
  if (shift != 0) align_leaf<T>(leaf, shift);
  *failed = head.failed;
  if (p.kept_offsets) *failed |= restrict_group<T>(p, grid, head.row, head.target, span, leaf, bitmap, lane);
  return leaf_stats<T, kExp, kMoments>(leaf, span.columns(), head.c, p.logit_scale, p.softcap);
}
template <bool kMoments>
__device__ __forceinline__ SoftmaxStats group_node(const SoftmaxStats& leaf, std::int32_t failed) {
  return failed ? failed_stats(failed) : tree_over_lanes<kMoments>(leaf);
}

}  // namespace rlk::cuda
