// For rows whose list holds every column that the row keeps: computes the masks and nodes without another read of the
// logits. Each block processes one row. Shared memory has the masks of all leaves, and the kept columns in ascending
// order. All architectures share this source.
#pragma once

#include <cstddef>

#include "first_columns.cuh"
#include "kernels/sample/tree.h"
#include "masses.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

__device__ __forceinline__ int bits_of(const uint4& mask) {
  return set_bits_of(mask.x) + set_bits_of(mask.y) + set_bits_of(mask.z) + set_bits_of(mask.w);
}
// Number of kept columns in a mask before `column`.
__device__ __forceinline__ int bits_before(const uint4& mask, int column) {
  const std::uint32_t words[] = {mask.x, mask.y, mask.z, mask.w};
  int count = 0;
#pragma unroll
  for (int k = 0; k < kMaskWords; ++k) {
    const int left = column - 32 * k;
    count += set_bits_of(words[k] & (left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1));
  }
  return count;
}

// A column's leaf, the leaf's slot, and the column's number in the leaf.
struct LeafColumn {
  int leaf, slot, column;
};

// Masks of all leaves, in shared memory. Other arrays of a KeptList lie behind the masks. While the masks are computed,
// the selection's `counts` still hold the columns of a bin.
template <int kThreads>
class LeafMasks {
 public:
  static constexpr int kLeafBytes = 16 + 4 + 2 + 2;

  __device__ __forceinline__ LeafMasks(FinishShared* shared, const SlotMap& map)
      : map_(map),
        of_part_(map.most_leaves()),
        leaves_(kNumParts * of_part_),
        masks_(reinterpret_cast<uint4*>(&shared->base)) {}

  __device__ __forceinline__ const SlotMap& map() const { return map_; }
  __device__ __forceinline__ int leaves() const { return leaves_; }
  __device__ __forceinline__ uint4* data() const { return masks_; }
  __device__ __forceinline__ uint4& operator[](int leaf) const { return masks_[leaf]; }
  // The number of kept columns for which shared memory has room behind the kLeafBytes of each leaf; 0 if it has no room
  // even for the leaves.
  __device__ __forceinline__ int room() const {
    return max(0, (static_cast<int>(sizeof(SampleShared)) - leaves_ * kLeafBytes) / 4);
  }
  // The caller passes a barrier before and after this function.
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int i = thread_of_block(); i < leaves_; i += kThreads) masks_[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void add(const LeafColumn& of) const {
    atomicOr(reinterpret_cast<std::uint32_t*>(masks_ + of.leaf) + of.column / 32, 1u << (of.column % 32));
  }
  // `rank`: an entry of a list; ranks order columns by descending z. In place of the column's id, the lower bits of a
  // rank hold the column's place (place_of).
  __device__ __forceinline__ LeafColumn column_of(std::uint64_t rank) const {
    const auto place = static_cast<int>(id_of_rank(rank));
    const int slot = place / kLeafColumns;
    return {leaf_of(slot), slot, place % kLeafColumns};
  }
  __device__ __forceinline__ int leaf_of(int slot) const {
    return slot - (slot >> map_.height) * ((1 << map_.height) - of_part_);
  }
  // Calls fn(slot, leaf) for the thread's slots that have a leaf.
  template <class F>
  __device__ __forceinline__ void each_slot(F fn) const {
#pragma unroll 1
    for (int slot = thread_of_block(); slot < kNumParts << map_.height; slot += kThreads) {
      if ((slot & ((1 << map_.height) - 1)) < of_part_) fn(slot, leaf_of(slot));
    }
  }

 private:
  static_assert(sizeof(SampleShared) / kLeafBytes * sizeof(uint4) <= offsetof(SampleShared, found_prefix));
  static_assert(offsetof(SampleShared, found_prefix) < offsetof(SampleShared, counts));

  const SlotMap map_;
  const int of_part_, leaves_;  // most leaves of a part; leaves of all parts
  uint4* const masks_;
};

// The sum of the terms of a leaf's kept columns, in the order of its chains. next() returns the terms one after
// another, in ascending order of columns.
template <class Next>
__device__ __forceinline__ float sum_of_kept(const std::uint32_t* words, Next next) {
  float sums[kNumChains] = {};
#pragma unroll 1
  for (int k = 0; k < kMaskWords; ++k) {
#pragma unroll 1
    for (std::uint32_t left = words[k]; left != 0; left &= left - 1) {
      const int chain = lowest_bit_of(left) % kNumChains;
      const float term = next();
#pragma unroll
      for (int r = 0; r < kNumChains; ++r) sums[r] = r == chain ? add_rn(sums[r], term) : sums[r];
    }
  }
#pragma unroll
  for (int d = 1; d < kNumChains; d *= 2) {
#pragma unroll
    for (int r = 0; r < kNumChains; r += 2 * d) sums[r] = add_rn(sums[r], sums[r + d]);
  }
  return sums[0];
}

// Computes a row's nodes and ids from its list. Loops are short and not unrolled, because a block runs this code once
// and waits for each cache line of its instructions.
template <Exp kExp, int kThreads>
class KeptList {
  using Masks = LeafMasks<kThreads>;

 public:
  // `c`, `mask` and `nodes` belong to the row.
  __device__ __forceinline__ KeptList(FinishShared* shared, const Masks& masks, float c, std::uint32_t* mask,
                                      float* nodes)
      : s_(*shared),
        masks_(masks),
        leaves_(masks.leaves()),
        slots_(kNumParts << masks.map().height),
        c_(c),
        mask_of_row_(reinterpret_cast<uint4*>(mask)),
        nodes_(nodes) {}

  // The caller has completed the masks and passed a barrier. is_kept(rank): whether the row keeps a listed column.
  // `ids_end`: the function stores the kept ids before this address, if they fit behind the list. Returns the number of
  // kept columns; if they exceed masks.room(), the nodes are not computed.
  template <class IsKept>
  __device__ __forceinline__ std::uint32_t run(const std::uint64_t* list, int size, std::int32_t* ids_end,
                                               IsKept is_kept) {
    const int own = (leaves_ + kThreads - 1) / kThreads;  // neighbouring leaves of a thread
    const int first = min(thread_of_block() * own, leaves_), end = min(first + own, leaves_);
    std::uint32_t count = 0;
#pragma unroll 1
    for (int leaf = first; leaf < end; ++leaf) count += static_cast<std::uint32_t>(bits_of(masks_[leaf]));
    std::uint32_t begin = block_scan<kThreads>(count, &s_, 0);
    if (thread_of_block() == kThreads - 1) s_.listed = begin + count;
    if (thread_of_block() == 0) s_.slots = 0;
#pragma unroll 1
    for (int leaf = first; leaf < end; ++leaf) {
      begins()[leaf] = static_cast<std::uint16_t>(begin);
      begin += static_cast<std::uint32_t>(bits_of(masks_[leaf]));
    }
    masks_.each_slot([&](int slot, int leaf) {
      references()[leaf] = reference_of(masks_.map().has_columns(slot) ? nodes_[2 * slots_ + slot] : -infinity());
    });
    __syncthreads();
    const std::uint32_t kept = s_.listed;
    if (static_cast<int>(kept) > masks_.room()) return kept;
    if (ids_end != nullptr && list + size > reinterpret_cast<const std::uint64_t*>(ids_end) - (kept + 1) / 2) {
      ids_end = nullptr;
    }
    has_ids_ = ids_end != nullptr;
    constexpr int kAtOnce = 2;
    batches_of_list<kAtOnce, kThreads>(list, size, [&](const std::uint64_t(&rank)[kAtOnce], const bool(&has)[kAtOnce]) {
      int at[kAtOnce];
      float own[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const LeafColumn of = masks_.column_of(rank[k]);
        at[k] = begins()[of.leaf] + bits_before(masks_[of.leaf], of.column);
        own[k] = term(z_of_rank(rank[k]), references()[of.leaf]);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (!has[k] || !is_kept(rank[k])) continue;
        terms()[at[k]] = own[k];
        if (has_ids_) {
          ids_end[at[k] - static_cast<int>(kept)] = id_of_place(masks_.map(), static_cast<int>(id_of_rank(rank[k])));
        }
      }
    });
    __syncthreads();
    // In this loop a thread takes leaves with at most two kept columns, whose sum does not depend on an order. A second
    // loop takes leaves with more kept columns, so few threads wait for long sums. A node replaces its leaf's mask in
    // shared memory.
    masks_.each_slot([&](int slot, int leaf) {
      const uint4 mask = masks_[leaf];
      const int columns = bits_of(mask);
      mask_of_row_[slot] = mask;
      if (columns > 2) {
        large()[atomicAdd(&s_.slots, 1u)] = static_cast<std::uint16_t>(slot);
        return;
      }
      const float* const own_terms = terms() + begins()[leaf];
      store_node(slot, leaf, columns, columns > 1 ? add_rn(own_terms[0], own_terms[1]) : own_terms[0]);
    });
    __syncthreads();
#pragma unroll 1
    for (int i = thread_of_block(); i < static_cast<int>(s_.slots); i += kThreads) {
      const int slot = large()[i], leaf = masks_.leaf_of(slot);
      const float* term = terms() + begins()[leaf];
      const auto* const words = reinterpret_cast<const std::uint32_t*>(masks_.data() + leaf);
      store_node(slot, leaf, 1, sum_of_kept(words, [&] { return *term++; }));
    }
    __syncthreads();
    if (masks_.map().scans_roots()) store_roots();
    return kept;
  }
  // Whether run() has stored the ids.
  __device__ __forceinline__ bool has_ids() const { return has_ids_; }

 private:
  // Shared memory holds four values for each leaf: its mask, its reference m (its terms are relative to 2^m), the
  // number of kept columns before it, and an entry of the list of leaves with many columns. Behind these values, shared
  // memory holds the terms of the kept columns.
  static_assert(Masks::kLeafBytes == sizeof(uint4) + 4 + 2 + 2 && kNumParts % 2 == 0);
  __device__ __forceinline__ float* references() const { return reinterpret_cast<float*>(masks_.data() + leaves_); }
  __device__ __forceinline__ std::uint16_t* begins() const {
    return reinterpret_cast<std::uint16_t*>(references() + leaves_);
  }
  __device__ __forceinline__ std::uint16_t* large() const { return begins() + leaves_; }
  __device__ __forceinline__ float* terms() const { return reinterpret_cast<float*>(large() + leaves_); }
  __device__ __forceinline__ float2* node_of(int leaf) const { return reinterpret_cast<float2*>(masks_.data() + leaf); }

  // The reference m of a leaf, from the leaf's largest z. A leaf that keeps any column also keeps its largest column.
  // The result is -Inf if the leaf adds nothing.
  __device__ __forceinline__ float reference_of(float largest) const {
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c_, largest, &stats);
    return reference.usable ? reference.m : -infinity();
  }
  // A kept column's term in a leaf with reference m. Few columns reach the clamp.
  __device__ __forceinline__ float term(float z, float m) const {
    if (!(fma_rn(z, c_, -m) >= 1.0f - kStatsFloor)) {
      if (z == -infinity()) return 0.0f;
      z = fmaxf(z, leaf_clamp(c_, m));
    }
    return BlockTeam<kThreads>().template exponential<kExp>(z, c_, m);
  }
  __device__ __forceinline__ void store_node(int slot, int leaf, int columns, float sum) const {
    const float m = columns > 0 ? references()[leaf] : -infinity();
    const float2 node = make_float2(m, m == -infinity() ? 0.0f : sum);
    *node_of(leaf) = node;
    reinterpret_cast<float2*>(nodes_)[slot] = node;
  }
  // Stores the root of every 32 neighbouring slots, as a scan does.
  __device__ __forceinline__ void store_roots() const {
    auto* const roots = reinterpret_cast<float2*>(scanned_roots(nodes_, slots_));
#pragma unroll 1
    for (int k = warp_of_block(); k < slots_ / kWarp; k += kThreads / kWarp) {
      const int slot = k * kWarp + lane_of_warp();
      float2 node = {-infinity(), 0.0f};
      if (masks_.map().has_columns(slot)) node = *node_of(masks_.leaf_of(slot));
      const SoftmaxStats root = tree_over_lanes<false>({node.x, node.y, 0.0f, 0.0f});
      if (lane_of_warp() == 0) roots[k] = make_float2(root.m, root.S);
    }
  }

  FinishShared& s_;
  const Masks masks_;
  const int leaves_, slots_;
  const float c_;
  uint4* const mask_of_row_;
  float* const nodes_;
  bool has_ids_ = false;
};

}  // namespace
}  // namespace rlk::cuda
