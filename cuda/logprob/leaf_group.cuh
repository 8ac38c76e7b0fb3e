// One warp computes the statistics of a group: up to 32 leaves (of 128 columns) of one row. The leaves are copied to
// shared memory, each lane computes one leaf, and shuffles combine the leaves by a binary tree. The group's result is a
// node of the tree over the whole row. All kernels share this code; they differ in how they combine the nodes of a
// row's groups to the root.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "kernels/vocabulary/logprob_groups.h"
#include "kernels/vocabulary/logprob_row.h"
#include "leaf.cuh"

namespace rlk::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kGroupLeaves == kWarp);
constexpr int kKeptWords = kGroupColumns / 32;  // a bitmap says which of a group's columns are kept
constexpr int kKeptWordsPerLeaf = kLeafColumns / 32;

// Bytes of the copy of a group in shared memory (its "image"). The image has the group's columns, and the bytes before
// the first column in the same line of 128 bytes.
constexpr int kLine = 128;
template <class T>
constexpr int kGroupBytes = kGroupColumns* static_cast<int>(sizeof(typename T::Storage)) + kLine;

__device__ __forceinline__ float shuffle_xor(float x, int distance) { return __shfl_xor_sync(kAllLanes, x, distance); }

// A tree combines two nodes at a time: it rescales them to the larger of their references (exponents) and adds. If all
// nodes of a warp are rescaled at once to the largest reference, the bits stay the same within these bounds, since no
// value leaves fp32's normal range.
constexpr int kTreeGap = 30;
__device__ __forceinline__ bool in_tree_range(float x) {
  const float magnitude = abs_of(x);
  return bits_of(x) == 0 || (magnitude >= 0x1p-40f && magnitude <= 0x1p+90f);
}

// Combines the nodes of all lanes by a perfect binary tree. Every lane gets the root.
template <bool kMoments>
__device__ __forceinline__ SoftmaxStats tree_over_lanes(SoftmaxStats s) {
  // m is the node's reference as an integer, with |m| < 2^21. kIdentity (a node without columns) lies far below this
  // range, and kFailed (NaN, a failed row) lies far above.
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

// Returns the root of `count` nodes. `count` is a power of two up to 1024, and load(index) returns a node.
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

// What a lane does to copy a group to shared memory, and where the lane's own leaf lies in the image.
template <class T>
struct GroupCopy {
  const char* from;  // the lane's chunk of 16 bytes in round 0
  int begin, end;    // byte range of the columns in the image
  Leaf<T> leaf;
  int leaf_columns;

  // `row` is the address that the row's column 0 has, or would have if this shard held it. `image` is the image's
  // address in shared memory.
  __device__ __forceinline__ GroupCopy(const typename T::Storage* row, const GroupGrid& grid, Group group,
                                       std::uint32_t image, int lane) {
    constexpr int kSize = static_cast<int>(sizeof(typename T::Storage));
    const GroupColumns columns = group_columns(grid, group);
    const LeafSpan span = leaf_span(grid, group, lane);
    const typename T::Storage* source = row + columns.first;
    begin = static_cast<int>(reinterpret_cast<std::uintptr_t>(source) % kLine);
    end = begin + columns.count * kSize;
    from = reinterpret_cast<const char*>(source) - begin + lane * 16;
    leaf.address = image + begin / 16 * 16 + (span.first - columns.first) * kSize;
    leaf_columns = span.columns;
  }
  // The distance in bytes from the start of a leaf's first chunk to the leaf's first column. Leaves begin at multiples
  // of 8 columns, so all leaves of a row have the same shift.
  __device__ __forceinline__ int shift() const { return begin % 16; }

  // Starts the copy, in rounds of one chunk of 16 bytes per lane. The copy reads no byte past the last column. It may
  // read up to 15 bytes before the first column, in the same chunk.
  __device__ __forceinline__ void start(std::uint32_t image, int lane) const {
    start(image, lane, [](int) { return true; });
  }
  // needs(byte): whether to copy the chunk that begins `byte` bytes after the first column. `byte` may be negative.
  template <class Needs>
  __device__ __forceinline__ void start(std::uint32_t image, int lane, Needs needs) const {
    constexpr int kSize = static_cast<int>(sizeof(typename T::Storage));
    constexpr int kRound = kWarp * 16, kRounds = kGroupColumns * kSize / kRound;
    constexpr int kPeriod = 8 * Leaf<T>::kBytes / kRound;  // the permutation repeats after this many rounds
    std::uint32_t to[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) to[i] = Leaf<T>::place(image + lane * 16 + i * kRound);
    const auto copy = [&](int i) {
      if (needs(lane * 16 + i * kRound - begin)) {
        copy_async_16(to[i % kPeriod] + i / kPeriod * kPeriod * kRound, from + i * kRound);
      }
    };
    const int left = (end >> 4) - lane;  // number of whole chunks from the lane's first chunk to the end
    if (lane >= begin / 16 && 0 < left) copy(0);
    if (end - begin == kRounds * kRound) {
#pragma unroll
      for (int i = 1; i < kRounds; ++i) copy(i);
      if (kRounds * kWarp < left) copy(kRounds);
    } else {
#pragma unroll
      for (int i = 1; i <= kRounds; ++i) {
        if (i * kWarp < left) copy(i);
      }
    }
    // The last chunk, if partial, is copied element by element, since nothing past the last column may be read.
    const int rest = end / 16 * 16 + lane * kSize;
    if (begin <= rest && rest < end) {
      using Storage = typename T::Storage;
      *static_cast<Storage*>(__cvta_shared_to_generic(Leaf<T>::place(image + rest))) =
          *reinterpret_cast<const Storage*>(from - lane * 16 + rest);
    }
  }
};

// Sets those columns of a leaf to -Inf that are not in the row's kept set (for example, the set that top-k kept).
template <class T>
__device__ __forceinline__ void drop_columns(const Leaf<T>& leaf, int columns, const std::uint32_t* keep) {
  const typename T::Storage minus_infinity = T::store(-infinity());
#pragma unroll 1
  for (int column = 0; column < columns; ++column) {
    if (!(keep[column >> 5] >> (column & 31) & 1)) *leaf.element(column) = minus_infinity;
  }
}

// Sets the bits of a group's kept columns in `bitmap`; words [4 l, 4 l + 4) belong to lane l's leaf. If an id of the
// list is out of range, at least one lane returns true.
__device__ __forceinline__ bool mark_kept(const LogprobInput& p, const GroupGrid& grid, const KeptRange& kept,
                                          std::int64_t target, const LeafSpan& span, std::uint32_t* bitmap, int lane) {
  if (grid.groups_per_part > 0) {  // the group is a range of columns: the lanes share the list
    const int first = __shfl_sync(kAllLanes, span.first, 0);
    const int columns = static_cast<int>(__reduce_add_sync(kAllLanes, static_cast<unsigned>(span.columns)));
    return scan_kept(p, kept, target, lane, kWarp, [&](std::int64_t id) {
      const std::int64_t column = id - first;
      if (column >= 0 && column < columns) atomicOr(&bitmap[column >> 5], 1u << (column & 31));
    });
  }
  std::uint32_t* keep = bitmap + lane * kKeptWordsPerLeaf;
  // The group has several parts of a small vocabulary: each lane scans the whole list for its own leaf.
  return scan_kept(p, kept, target, 0, 1, [&](std::int64_t id) {
    const std::int64_t column = id - span.first;
    if (column >= 0 && column < span.columns) keep[column >> 5] |= 1u << (column & 31);
  });
}

// Restricts a group to its row's kept set. Returns kBadKept if the list of kept ids is invalid. `bitmap` has kKeptWords
// words.
template <class T>
__device__ __forceinline__ std::int32_t restrict_group(const LogprobInput& p, const GroupGrid& grid, std::int64_t row,
                                                       const LeafSpan& span, const Leaf<T>& leaf, std::uint32_t* bitmap,
                                                       int lane) {
  const KeptRange kept = kept_range(p, row);
  if (kept.bad) return kBadKept;
  if (!kept.restricts()) return 0;
  std::uint32_t* keep = bitmap + lane * kKeptWordsPerLeaf;
  for (int i = 0; i < kKeptWordsPerLeaf; ++i) keep[i] = 0;
  __syncwarp();
  const bool bad = mark_kept(p, grid, kept, target_of(p, row), span, bitmap, lane);
  const std::int32_t status = __any_sync(kAllLanes, bad) ? kBadKept : 0;
  __syncwarp();
  drop_columns<T>(leaf, span.columns, keep);
  return status;
}

// Prepares a lane's leaf in the image: aligns it, and drops columns that the row does not keep. Returns the row's
// status bits. `bitmap`: kKeptWords words, needed if the call restricts rows.
template <class T>
__device__ __forceinline__ std::int32_t prepare_leaf(const LogprobInput& p, const GroupGrid& grid, std::int64_t row,
                                                     Group group, const Leaf<T>& leaf, int columns, int shift,
                                                     std::uint32_t* bitmap, int lane) {
  if (shift != 0) align_leaf<T>(leaf, columns, shift);
  if (!p.kept_offsets) return kOk;
  return restrict_group<T>(p, grid, row, leaf_span(grid, group, lane), leaf, bitmap, lane);
}

}  // namespace rlk::cuda
