// A warp draws a column: the warp descends five levels of the tree at a time, then draws one of the leaf's chains, and
// then a column of this chain.
#pragma once

#include "../logprob/leaf_group.cuh"
#include "kernels/sample/tree.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// A drawn token, and its z.
struct Drawn {
  std::int64_t id;
  float z;
};

// Random words of a draw: one for each level from the leaves up, then the words for a leaf's chains and for the prefix
// of a chain.
constexpr int kMostLevels = 15, kDrawWords = kMostLevels + 4;
constexpr int kOwnColumns = kLeafColumns / kWarp;  // columns of a leaf that a lane holds: lane, lane + 32, ...
static_assert(kPrefixWord == kChainWord + 3 && kDrawWords <= kWarp);

// The index, among the token's random words, of the draw's i-th word. Above the root the draw always descends to the
// left node, so the value of the word does not matter.
__device__ __forceinline__ int draw_word(int i, int height) {
  const int above = 2 - (i - height);
  return i >= kMostLevels ? kChainWord + i - kMostLevels : i < height ? 7 + i : above > 0 ? above : 0;
}

struct DrawnLane {
  SoftmaxStats root;
  int lane;  // lane of the drawn node
};
// Computes several trees, and draws a node in each tree. A tree has 32 neighbouring nodes, one per lane; `level` is
// their level. The steps of the trees overlap. Because all random words are known before the draw, each inner node
// decides between its children without the choices above it. Lane l decides for the node whose left child ends at lane
// l - 1 and whose right child begins at lane l. A draw in a failed tree is arbitrary.
template <int kTrees>
__device__ __forceinline__ void draw_over_lanes(const SoftmaxStats (&nodes)[kTrees], int level,
                                                const std::uint32_t* words, DrawnLane (&drawn)[kTrees]) {
  constexpr int kLevels = 5;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int own_level = lane == 0 ? 0 : lowest_bit_of(static_cast<std::uint32_t>(lane));
  const std::uint32_t r = words[level + own_level];
  float left[kTrees] = {}, both[kTrees] = {};  // sums below the lane's node, relative to 2^m of the whole tree
  float m[kTrees], gap[kTrees];
  bool simple = true;
#pragma unroll
  for (int k = 0; k < kTrees; ++k) {
    // Maps the bits of m to integers in the same order; a NaN becomes the largest or the smallest integer.
    const std::int32_t bits = bits_of(nodes[k].m), key = bits < 0 ? bits ^ 0x7fffffff : bits;
    const std::int32_t most = __reduce_max_sync(kAllLanes, key);
    m[k] = float_of(most < 0 ? most ^ 0x7fffffff : most);
    gap[k] = sub_rn(nodes[k].m, m[k]);
    // In a tree that holds only identities, both branches give the same result.
    simple = simple && (nodes[k].m == -infinity() || gap[k] >= -kTreeGap) && m[k] < infinity();
  }
  if (__all_sync(kAllLanes, simple)) {
    // All sums of a tree are relative to the same power of two (the reference), as in tree_over_lanes().
#pragma unroll
    for (int k = 0; k < kTrees; ++k) {
      const float factor = float_of((bits_of(add_rn(gap[k], kStatsShift)) << 23) + (127 << 23));
      float sum = nodes[k].m == -infinity() ? 0.0f : mul_rn(nodes[k].S, factor);
#pragma unroll
      for (int i = 0; i < kLevels; ++i) {
        const float other = shuffle_xor(sum, 1 << i);
        sum = add_rn(sum, other);
        left[k] = own_level == i ? other : left[k];
        both[k] = own_level == i ? sum : both[k];
      }
      drawn[k].root = {m[k], sum, 0.0f, 0.0f};
    }
  } else {
#pragma unroll
    for (int k = 0; k < kTrees; ++k) {
      SoftmaxStats s = nodes[k];
#pragma unroll 1
      for (int i = 0; i < kLevels; ++i) {
        const SoftmaxStats other = {shuffle_xor(s.m, 1 << i), shuffle_xor(s.S, 1 << i), 0.0f, 0.0f};
        s = combine(s, other);
        if (own_level != i) continue;
        both[k] = s.S;
        left[k] = other.m == -infinity() ? 0.0f : combine(other, {s.m, 0.0f, 0.0f, 0.0f}).S;
      }
      drawn[k].root = s;
    }
  }
#pragma unroll
  for (int k = 0; k < kTrees; ++k) {
    const unsigned lefts = __ballot_sync(kAllLanes, draws_left(r, left[k], both[k]));
    int at = 0;
#pragma unroll
    for (int i = kLevels - 1; i >= 0; --i) {
      const int node = at | 1 << i;
      at = (lefts >> node & 1) != 0 ? at : node;
    }
    drawn[k].lane = at;
  }
}
__device__ __forceinline__ DrawnLane draw_over_lanes(const SoftmaxStats& node, int level, const std::uint32_t* words) {
  const SoftmaxStats nodes[] = {node};
  DrawnLane drawn[1];
  draw_over_lanes(nodes, level, words, drawn);
  return drawn[0];
}

// Draws one of `count` nodes of level 5, by draw_over_lanes() for each 32 nodes and for their roots. node_at(i) returns
// a node; for i >= count it returns the identity.
template <class Node>
__device__ __forceinline__ DrawnLane draw_over_nodes(int count, Node node_at, const std::uint32_t* words) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), groups = count > kWarp ? count / kWarp : 1;
  DrawnLane drawn, of_group = {identity_stats(), 0};  // lane i has group i
#pragma unroll 1
  for (int i = 0; i < groups + (groups > 1 ? 1 : 0); ++i) {
    const bool last = i == groups;
    drawn = draw_over_lanes(last ? of_group.root : node_at(i * kWarp + lane), last ? 10 : 5, words);
    if (last) drawn.lane = drawn.lane * kWarp + __shfl_sync(kAllLanes, of_group.lane, drawn.lane);
    if (lane == i) of_group = drawn;
  }
  return drawn;
}

// Draws a column of a leaf, with probabilities in proportion to the terms of its columns. The term of a column that is
// not kept is +0.
__device__ __forceinline__ int draw_column(const float (&terms)[kOwnColumns], const std::uint32_t* words) {
  constexpr int kSteps = kLeafColumns / kNumChains, kShares = kWarp / kNumChains, kShare = kSteps / kShares;
  static_assert(kShares == 4 && kShare == 4 && kNumChains == 8);
  const int lane = static_cast<int>(threadIdx.x % kWarp), own = lane % kNumChains, share = lane / kNumChains;
  // Four lanes share a chain; each lane tests four of the chain's prefix sums.
  float one = 0.0f, mine[kShare] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    one = add_rn(one, __shfl_sync(kAllLanes, terms[i / kShares], i % kShares * kNumChains + own));
    mine[i % kShare] = share == i / kShare ? one : mine[i % kShare];
  }
  const float next = shuffle_xor(one, 1), two = add_rn(one, next);
  const float next_two = shuffle_xor(two, 2), four = add_rn(two, next_two);
  const float next_four = shuffle_xor(four, 4), all = add_rn(four, next_four);
  const bool upper_four = (own & 4) != 0, upper_two = (own & 2) != 0, upper_one = (own & 1) != 0;
  const bool left_four = draws_left(words[kMostLevels], upper_four ? next_four : four, all);
  const bool left_two = draws_left(words[kMostLevels + 1], upper_two ? next_two : two, four);
  const bool left_one = draws_left(words[kMostLevels + 2], upper_one ? next : one, two);
  const bool drawn = (left_four != upper_four) & (left_two != upper_two) & (left_one != upper_one);
  const int chain = __ffs(static_cast<int>(__ballot_sync(kAllLanes, drawn))) - 1;
  const std::uint32_t r = words[kMostLevels + 3];
  std::uint32_t found = 0;  // bit k of byte i: whether the sum that ends with step kShare * i + k is large enough
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    found |= (__ballot_sync(kAllLanes, draws_left(r, mine[k], one)) >> chain & 0x01010101u) << k;
  }
  const int first = __ffs(static_cast<int>(found)) - 1;
  return (first / 8 * kShare + first % 8) * kNumChains + chain;
}

// z of a column, from the lane that holds it.
__device__ __forceinline__ float z_in_lanes(const float (&z)[kOwnColumns], int column) {
  static_assert(kOwnColumns == 4);
  float of[kOwnColumns];
#pragma unroll
  for (int k = 0; k < kOwnColumns; ++k) of[k] = __shfl_sync(kAllLanes, z[k], column % kWarp);
  const float low = column < kWarp ? of[0] : of[1], high = column < 3 * kWarp ? of[2] : of[3];
  return column < 2 * kWarp ? low : high;
}

// The roots that a scan stores, one for every 32 neighbouring slots. The roots lie behind the nodes and the leaves'
// largest z.
__device__ __forceinline__ float* scanned_roots(float* nodes, std::int64_t slots) { return nodes + 3 * slots; }

}  // namespace
}  // namespace rlk::cuda
