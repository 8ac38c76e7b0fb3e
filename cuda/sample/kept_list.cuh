// Computes the masks and nodes of a row whose list holds every column that it keeps, without another read of the
// logits. Each block processes one row. Shared memory has the masks of all leaves, and the kept columns in ascending
// order. All architectures share this source.
#pragma once

#include <cstddef>

#include "first_columns.cuh"
#include "masses.cuh"
#include "rlk/kernels/sample_tree.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

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

// A column's leaf, the leaf's slot, and the column's number in it.
struct LeafColumn {
  int leaf, slot, column;
};

// Masks of all leaves, in shared memory. Other arrays of a KeptList follow them. While the masks are made, `counts` still
// holds the columns of a bin.
class LeafMasks {
 public:
  __device__ __forceinline__ LeafMasks(FinishShared* shared, const SlotMap& map)
      : map_(map),
        of_part_(map.most_leaves()),
        leaves_(kNumParts * of_part_),
        masks_(reinterpret_cast<uint4*>(&shared->base)) {}

  __device__ __forceinline__ const SlotMap& map() const { return map_; }
  __device__ __forceinline__ int leaves() const { return leaves_; }
  __device__ __forceinline__ uint4* data() const { return masks_; }
  __device__ __forceinline__ uint4& operator[](int leaf) const { return masks_[leaf]; }
  // Whether the masks fit into shared memory.
  __device__ __forceinline__ bool fit() const { return leaves_ <= kMostLeaves; }
  // The caller passes barriers before and behind.
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int i = thread_of_block(); i < leaves_; i += kRowThreads) masks_[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void add(const LeafColumn& of) const {
    atomicOr(reinterpret_cast<std::uint32_t*>(masks_ + of.leaf) + of.column / 32, 1u << (of.column % 32));
  }
  __device__ __forceinline__ LeafColumn column_of(std::uint64_t rank) const {
    LeafColumn of;
    of.slot = map_.slot_of(static_cast<int>(id_of_rank(rank)), &of.column);
    of.leaf = of.slot - (of.slot >> map_.height) * ((1 << map_.height) - of_part_);
    return of;
  }
  __device__ __forceinline__ int slot_of_leaf(int leaf) const {
    const int part = leaf / of_part_;
    return (part << map_.height) + leaf - part * of_part_;
  }

 private:
  static constexpr int kMostLeaves = static_cast<int>(offsetof(SampleShared, found_prefix)) / 16;
  static_assert(offsetof(SampleShared, found_prefix) < offsetof(SampleShared, counts));

  const SlotMap map_;
  const int of_part_, leaves_;  // most leaves of a part; leaves of all parts
  uint4* const masks_;
};

template <class T, Exp kExp>
class KeptList : RowTree<BlockTeam<kRowThreads>, T, kExp> {
  using Team = BlockTeam<kRowThreads>;
  using Base = RowTree<Team, T, kExp>;
  using Base::mask_, Base::state_, Base::nodes_;

 public:
  // i: the row's number in the chunk.
  __device__ __forceinline__ KeptList(const SampleParams& p, const SampleChunk& chunk, std::int64_t i,
                                      FinishShared* shared, const LeafMasks& masks)
      : Base(Team(), p, chunk.first + i, &shared->base, chunk.masks + i * sample_mask_words(p.vocab_size),
             chunk.states + i, chunk.nodes + i * sample_node_floats(p.vocab_size)),
        s_(*shared),
        masks_(masks),
        leaves_(masks.leaves()) {}

  // The kept columns that shared memory holds, or 0.
  static __device__ __forceinline__ int capacity(const LeafMasks& masks) {
    return masks.fit() ? (static_cast<int>(sizeof(SampleShared)) - masks.leaves() * kLeafBytes) / 4 : 0;
  }
  // The masks are complete, and the row's state has its cut, behind a barrier.
  __device__ __forceinline__ void run(const std::uint64_t* list, int size) {
    this->load_state();
    const int own = (leaves_ + kRowThreads - 1) / kRowThreads;  // neighbouring leaves of a thread
    const int first = min(thread_of_block() * own, leaves_), end = min(first + own, leaves_);
    std::uint32_t count = 0;
#pragma unroll 1
    for (int leaf = first; leaf < end; ++leaf) {
      count += static_cast<std::uint32_t>(bits_of(masks_[leaf]));
    }
    std::uint32_t begin = block_scan(count, &s_, 0);
    if (thread_of_block() == kRowThreads - 1) s_.listed = begin + count;
    if (thread_of_block() == 0) s_.slots = 0;
#pragma unroll 1
    for (int leaf = first; leaf < end; ++leaf) {
      begins()[leaf] = static_cast<std::uint16_t>(begin);
      begin += static_cast<std::uint32_t>(bits_of(masks_[leaf]));
    }
    __syncthreads();
    const std::uint32_t kept = s_.listed;
    if (static_cast<int>(kept) > capacity(masks_)) return;
    constexpr int kAtOnce = 4;
    batches_of_list<kAtOnce>(list, size, [&](const std::uint64_t(&rank)[kAtOnce], const bool(&has)[kAtOnce]) {
      float m[kAtOnce], term[kAtOnce];
      int at[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const LeafColumn of = masks_.column_of(rank[k]);
        at[k] = begins()[of.leaf] + bits_before(masks_[of.leaf], of.column);
        m[k] = reference_of(of.slot);
        term[k] = this->term(z_of_rank(rank[k]), {m[k], -infinity(), true});
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const float z = z_of_rank(rank[k]);
        if (!has[k] || rank[k] > this->last_ || !this->survives(z)) continue;
        const bool common = fma_rn(z, this->c_, -m[k]) >= 1.0f - kStatsFloor;  // few columns reach the clamp
        terms()[at[k]] = common ? term[k] : this->term(z, {m[k], leaf_clamp(this->c_, m[k]), true});
      }
    });
    __syncthreads();
    // A thread has a leaf of up to two kept columns, whose sum has one order. A second loop has leaves of more columns,
    // so that few threads wait for them.
    auto* const masks_of_row = reinterpret_cast<uint4*>(mask_);
    auto* const nodes_of_row = reinterpret_cast<float2*>(nodes_);
#pragma unroll 1
    for (int leaf = thread_of_block(); leaf < leaves_; leaf += kRowThreads) {
      const uint4 mask = masks_[leaf];
      const int columns = bits_of(mask), slot = masks_.slot_of_leaf(leaf);
      masks_of_row[slot] = mask;
      const std::uint32_t at = columns > 2 ? atomicAdd(&s_.slots, 1u) : kMostLarge;
      if (at < kMostLarge) {
        large()[at] = static_cast<std::uint16_t>(leaf);
        continue;
      }
      const float m = columns > 0 ? reference_of(slot) : -infinity();
      const float* const own = terms() + begins()[leaf];
      float sum = 0.0f;
      if (m != -infinity()) sum = columns > 2 ? sum_of(leaf) : columns > 1 ? add_rn(own[0], own[1]) : own[0];
      nodes_of_row[slot] = make_float2(m, sum);
    }
    __syncthreads();
    const int leaves = min(static_cast<int>(s_.slots), static_cast<int>(kMostLarge));
#pragma unroll 1
    for (int i = thread_of_block(); i < leaves; i += kRowThreads) {
      const int leaf = large()[i], slot = masks_.slot_of_leaf(leaf);
      const float m = reference_of(slot);
      nodes_of_row[slot] = make_float2(m, m == -infinity() ? 0.0f : sum_of(leaf));
    }
    __syncthreads();
    if (masks_.map().scans_roots()) store_roots();
    if (thread_of_block() != 0) return;
    state_->kept = kept;
    state_->waits = kForRoots;
  }

 private:
  // Shared memory holds a mask for each leaf, then the number of kept columns before each leaf, then the terms of the
  // kept columns.
  static constexpr int kLeafBytes = 16 + 2;
  static_assert(kNumParts % 2 == 0);
  static constexpr std::uint32_t kMostLarge = sizeof(FinishShared::roots) / 2;
  __device__ __forceinline__ std::uint16_t* begins() const {
    return reinterpret_cast<std::uint16_t*>(masks_.data() + leaves_);
  }
  __device__ __forceinline__ float* terms() const { return reinterpret_cast<float*>(begins() + leaves_); }
  // Leaves of more than two kept columns.
  __device__ __forceinline__ std::uint16_t* large() const { return reinterpret_cast<std::uint16_t*>(s_.roots); }

  // Stores the root of every 32 neighbouring slots, as a scan does.
  __device__ __forceinline__ void store_roots() const {
    const auto* const nodes = reinterpret_cast<const float2*>(nodes_);
    auto* const roots = reinterpret_cast<float2*>(scanned_roots(nodes_, this->slots_));
    const int groups = static_cast<int>(this->slots_) / kWarp;
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int base = warp_of_block(); base < groups; base += kAtOnce * kRowWarps) {
      float2 node[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int slot = min(base + k * kRowWarps, groups - 1) * kWarp + lane_of_warp();
        node[k] = masks_.map().has_columns(slot) ? nodes[slot] : make_float2(-infinity(), 0.0f);
      }
#pragma unroll 1
      for (int k = 0; k < kAtOnce && base + k * kRowWarps < groups; ++k) {
        const SoftmaxStats root = tree_over_lanes<false>({node[0].x, node[0].y, 0.0f, 0.0f});
        if (lane_of_warp() == 0) roots[base + k * kRowWarps] = make_float2(root.m, root.S);
#pragma unroll
        for (int r = 0; r + 1 < kAtOnce; ++r) node[r] = node[r + 1];
      }
    }
  }
  // The reference of a slot that keeps a column, and so keeps its largest; -Inf if the slot adds nothing.
  __device__ __forceinline__ float reference_of(int slot) const {
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(this->c_, nodes_[2 * this->slots_ + slot], &stats);
    return reference.usable ? reference.m : -infinity();
  }
  // The sum of a leaf's terms.
  __device__ __forceinline__ float sum_of(int leaf) const {
    const float* term = terms() + begins()[leaf];
    const auto* const words = reinterpret_cast<const std::uint32_t*>(masks_.data() + leaf);
    float sums[kNumChains] = {};
#pragma unroll 1
    for (int k = 0; k < kMaskWords; ++k) {
#pragma unroll 1
      for (std::uint32_t left = words[k]; left != 0; left &= left - 1) {
        const int chain = lowest_bit_of(left) % kNumChains;
        const float own = *term++;
#pragma unroll
        for (int r = 0; r < kNumChains; ++r) sums[r] = r == chain ? add_rn(sums[r], own) : sums[r];
      }
    }
#pragma unroll
    for (int d = 1; d < kNumChains; d *= 2) {
#pragma unroll
      for (int r = 0; r < kNumChains; r += 2 * d) sums[r] = add_rn(sums[r], sums[r + d]);
    }
    return sums[0];
  }

  FinishShared& s_;
  const LeafMasks masks_;
  const int leaves_;
};

}  // namespace
}  // namespace rlk::cuda
