// The draw by a warp: the levels of the tree five at a time, then a leaf's chains and the sums along a chain.
#pragma once

#include "../logprob/leaf_group.cuh"
#include "rlk/kernels/sample_tree.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

// Words of a draw: one for each level from the leaves up, then those of a leaf's chains and prefix.
constexpr int kMostLevels = 15, kDrawWords = kMostLevels + 4;
constexpr int kOwnColumns = kLeafColumns / kWarp;  // columns of a leaf in a lane: lane, lane + 32, ...
static_assert(kPrefixWord == kChainWord + 3 && kDrawWords <= kWarp);

// The i-th of these words is this one of the token's words. Levels above the root's take the left node whatever their
// word is.
__device__ __forceinline__ int draw_word(int i, int height) {
  const int above = 2 - (i - height);
  return i >= kMostLevels ? kChainWord + i - kMostLevels : i < height ? 7 + i : above > 0 ? above : 0;
}

// The functions below take the i-th word from word(i), alike in all lanes.

// The lane of the node that a draw takes among the lanes' 32 neighbouring nodes; `level`: that of these nodes. Loops stay
// loops, since a row's block reads its instructions once and waits for each line of them.
template <class Word>
__device__ __forceinline__ int draw_over_lanes(SoftmaxStats s, int level, Word word) {
  constexpr int kLevels = 5;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  unsigned lefts = 0;  // in lane i: the nodes of level i whose parent's draw goes left
#pragma unroll 1
  for (int i = 0; i < kLevels; ++i) {
    const float m = shuffle_xor(s.m, 1 << i), S = shuffle_xor(s.S, 1 << i), most = s.m > m ? s.m : m;
    // Both sums at the common reference, as combine() does. An identity has the sum 0 at any reference.
    const auto at_most = [most](float sum, float m_of_sum) {
      const float gap = m_of_sum == most ? 0.0f : sub_rn(m_of_sum, most);
      return scale_down(sum, static_cast<std::int32_t>(gap > -600.0f ? gap : -600.0f));
    };
    const float own = at_most(s.S, s.m), other = at_most(S, m), both = add_rn(own, other);
    const float left = (lane >> i & 1) != 0 ? other : own;
    const unsigned of_level = __ballot_sync(kAllLanes, draws_left(word(level + i), left, both));
    lefts = lane == i ? of_level : lefts;
    s.m = most;
    s.S = both;
  }
  int at = 0;
#pragma unroll 1
  for (int i = kLevels - 1; i >= 0; --i) {
    at += (__shfl_sync(kAllLanes, lefts, i) >> at & 1) != 0 ? 0 : 1 << i;
  }
  return at;
}

struct DrawnSlot {
  int slot;
  float m;  // reference of its node
};
// root_at(i): root of the 32 slots from 32 i on, or an identity for i >= roots. node_at(slot): a slot's node.
template <class Root, class Node, class Word>
__device__ __forceinline__ DrawnSlot draw_slot(int roots, Root root_at, Node node_at, Word word) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  int at = 0;
  float m = 0.0f;
#pragma unroll 1
  for (int level = roots > kWarp ? 10 : 5; level >= 0; level -= 5) {
    SoftmaxStats node = identity_stats();
    if (level == 10) {  // a lane has the root of 32 roots
#pragma unroll 1
      for (int k = 0; k < roots / kWarp; ++k) {
        const SoftmaxStats root = tree_over_lanes<false>(root_at(k * kWarp + lane));
        if (lane == k) node = root;
      }
    } else {
      node = level == 5 ? root_at(at * kWarp + lane) : node_at(at * kWarp + lane);
    }
    const int of_lanes = draw_over_lanes(node, level, word);
    m = __shfl_sync(kAllLanes, node.m, of_lanes);
    at = at * kWarp + of_lanes;
  }
  return {at, m};
}

// The column of a leaf that a draw takes, by the columns' terms; the term of a column that is not kept is +0.
template <class Word>
__device__ __forceinline__ int draw_column(const float (&terms)[kOwnColumns], Word word) {
  constexpr int kSteps = kLeafColumns / kNumChains, kInWarp = kWarp / kNumChains;
  const int lane = static_cast<int>(threadIdx.x % kWarp), own = lane % kNumChains;
  const auto term = [&](int step, int chain) {
    return __shfl_sync(kAllLanes, terms[step / kInWarp], step % kInWarp * kNumChains + chain);
  };
  float one = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) one = add_rn(one, term(i, own));
  const float next = shuffle_xor(one, 1), two = add_rn(one, next);
  const float next_two = shuffle_xor(two, 2), four = add_rn(two, next_two);
  const float next_four = shuffle_xor(four, 4), all = add_rn(four, next_four);
  const bool upper_four = (own & 4) != 0, upper_two = (own & 2) != 0, upper_one = (own & 1) != 0;
  const bool left_four = draws_left(word(kMostLevels), upper_four ? next_four : four, all);
  const bool left_two = draws_left(word(kMostLevels + 1), upper_two ? next_two : two, four);
  const bool left_one = draws_left(word(kMostLevels + 2), upper_one ? next : one, two);
  const bool drawn = (left_four != upper_four) & (left_two != upper_two) & (left_one != upper_one);
  const int chain = __ffs(static_cast<int>(__ballot_sync(kAllLanes, drawn))) - 1;
  // Lane i tests the sum of the chain's first i + 1 terms.
  float prefix = 0.0f, mine = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    prefix = add_rn(prefix, term(i, chain));
    mine = lane == i ? prefix : mine;
  }
  const bool found = draws_left(word(kMostLevels + 3), mine, prefix) && lane < kSteps;
  const int step = __ffs(static_cast<int>(__ballot_sync(kAllLanes, found))) - 1;
  return step * kNumChains + chain;
}

// z of a column that a lane of the warp has.
__device__ __forceinline__ float z_in_lanes(const float (&z)[kOwnColumns], int column) {
  static_assert(kOwnColumns == 4);
  float of[kOwnColumns];
#pragma unroll
  for (int k = 0; k < kOwnColumns; ++k) of[k] = __shfl_sync(kAllLanes, z[k], column % kWarp);
  const float low = column < kWarp ? of[0] : of[1], high = column < 3 * kWarp ? of[2] : of[3];
  return column < 2 * kWarp ? low : high;
}

// The roots that a scan stores, one for 32 neighbouring slots, behind the nodes and the leaves' largest z.
__device__ __forceinline__ float* scanned_roots(float* nodes, std::int64_t slots) { return nodes + 3 * slots; }

}  // namespace
}  // namespace rlk::cuda
