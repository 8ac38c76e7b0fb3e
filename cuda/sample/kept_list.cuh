// Computes the masks and nodes of a row whose list holds every column that it keeps, without another read of the
// logits. Each block processes one row. Shared memory has the masks of all leaves, and the kept columns in ascending
// order. All architectures share this source.
#pragma once

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

template <class T, Exp kExp>
class KeptList : RowTree<BlockTeam<kRowThreads>, T, kExp> {
  using Team = BlockTeam<kRowThreads>;
  using Base = RowTree<Team, T, kExp>;
  using Base::mask_, Base::state_, Base::nodes_;

 public:
  // i: the row's number in the chunk.
  __device__ KeptList(const SampleParams& p, const SampleChunk& chunk, std::int64_t i, FinishShared* shared,
                      const SlotMap& map)
      : Base(Team(), p, chunk.first + i, &shared->base, chunk.masks + i * sample_mask_words(p.vocab_size),
             chunk.states + i, chunk.nodes + i * sample_node_floats(p.vocab_size)),
        s_(*shared),
        map_(map),
        of_part_(map.most_leaves()),
        leaves_(kNumParts * of_part_) {}

  // The kept columns that shared memory holds.
  static __device__ __forceinline__ int capacity(const SlotMap& map) {
    return (static_cast<int>(sizeof(SampleShared)) - kNumParts * map.most_leaves() * kLeafBytes) / 4;
  }
  // Does nothing if shared memory is too small.
  __device__ void run(const std::uint64_t* list, int size) {
    if (capacity(map_) <= 0) return;
    this->load_state();
#pragma unroll 1
    for (int i = thread_of_block(); i < leaves_; i += kRowThreads) masks()[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    auto* const words = reinterpret_cast<std::uint32_t*>(masks());
    each_kept(list, size, [&](float, int leaf, int column) {
      atomicOr(words + leaf * kMaskWords + column / 32, 1u << (column % 32));
    });
    __syncthreads();
    const int own = (leaves_ + kRowThreads - 1) / kRowThreads;  // neighbouring leaves of a thread
    const int first = min(thread_of_block() * own, leaves_), end = min(first + own, leaves_);
    std::uint32_t count = 0;
#pragma unroll 1
    for (int leaf = first; leaf < end; ++leaf) {
      count += static_cast<std::uint32_t>(bits_of(masks()[leaf]));
    }
    std::uint32_t begin = block_scan(count, &s_, 0);
    if (thread_of_block() == kRowThreads - 1) s_.listed = begin + count;
#pragma unroll 1
    for (int leaf = first; leaf < end; ++leaf) {
      begins()[leaf] = static_cast<std::uint16_t>(begin);
      begin += static_cast<std::uint32_t>(bits_of(masks()[leaf]));
    }
    __syncthreads();
    const std::uint32_t kept = s_.listed;
    if (static_cast<int>(kept) > capacity(map_)) return;
    each_kept(list, size, [&](float z, int leaf, int column) {
      columns()[begins()[leaf] + bits_before(masks()[leaf], column)] = z;
    });
    __syncthreads();
#pragma unroll 1
    for (int leaf = thread_of_block(); leaf < leaves_; leaf += kRowThreads) {
      const int part = leaf / of_part_, slot = (part << map_.height) + leaf - part * of_part_;
      reinterpret_cast<uint4*>(mask_)[slot] = masks()[leaf];
      reinterpret_cast<float2*>(nodes_)[slot] = node_of(leaf);
    }
    if (thread_of_block() != 0) return;
    state_->kept = kept;
    state_->waits = kForRoots;
  }

 private:
  // Shared memory holds a mask for each leaf, then the number of kept columns before each leaf, then the kept columns.
  static constexpr int kLeafBytes = 16 + 2;
  static_assert(kNumParts % 2 == 0);
  __device__ __forceinline__ uint4* masks() const { return reinterpret_cast<uint4*>(&s_.base); }
  __device__ __forceinline__ std::uint16_t* begins() const {
    return reinterpret_cast<std::uint16_t*>(masks() + leaves_);
  }
  __device__ __forceinline__ float* columns() const { return reinterpret_cast<float*>(begins() + leaves_); }

  // Calls fn(z, leaf, column in the leaf) for the thread's share of the kept columns.
  template <class F>
  __device__ __forceinline__ void each_kept(const std::uint64_t* list, int size, F fn) const {
    each_of_list<1>(list, size, [&](std::uint64_t rank, float z) {
      if (rank > this->last_ || !this->survives(z)) return;
      int column;
      const int slot = map_.slot_of(static_cast<int>(id_of_rank(rank)), &column);
      const int part = slot >> map_.height;
      fn(z, slot - part * ((1 << map_.height) - of_part_), column);
    });
  }
  // The node of a leaf, by the z of its kept columns.
  __device__ __forceinline__ float2 node_of(int leaf) const {
    const int count = bits_of(masks()[leaf]);
    if (count == 0) return make_float2(-infinity(), 0.0f);
    const float* z = columns() + begins()[leaf];
    float largest = z[0];
#pragma unroll 1
    for (int i = 1; i < count; ++i) largest = fmaxf(largest, z[i]);
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(this->c_, largest, &stats);
    if (!reference.usable) return make_float2(stats.m, stats.S);
    const auto* const words = reinterpret_cast<const std::uint32_t*>(masks() + leaf);
    float sums[kNumChains] = {};
#pragma unroll 1
    for (int k = 0; k < kMaskWords; ++k) {
#pragma unroll 1
      for (std::uint32_t left = words[k]; left != 0; left &= left - 1) {
        const int chain = lowest_bit_of(left) % kNumChains;
        const float term = this->term(*z++, reference);
#pragma unroll
        for (int r = 0; r < kNumChains; ++r) sums[r] = r == chain ? add_rn(sums[r], term) : sums[r];
      }
    }
#pragma unroll
    for (int d = 1; d < kNumChains; d *= 2) {
#pragma unroll
      for (int r = 0; r < kNumChains; r += 2 * d) sums[r] = add_rn(sums[r], sums[r + d]);
    }
    return make_float2(reference.m, sums[0]);
  }

  FinishShared& s_;
  const SlotMap map_;
  const int of_part_, leaves_;  // most leaves of a part; leaves of all parts
};

}  // namespace
}  // namespace rlk::cuda
