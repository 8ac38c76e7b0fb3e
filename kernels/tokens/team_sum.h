// Sums in the order of math/tree_sum.h by teams of 32 lanes, shared by CUDA and HIP. A Team has a function writes(),
// which tells whether this lane stores results: both halves of a wave of 64 lanes may do the same team's work. A Block
// has team(), its number() in the block, the number of teams() (a power of two, at most 32), and barrier(). The Block's
// sums() are floats in shared memory, one per team.
#pragma once

#include <type_traits>

#include "rlk/math/tree_sum.h"

namespace rlk {

constexpr int kTeamLanes = 32;
constexpr int kTeamChunk = 128;  // elements that a team adds at a time
constexpr int kLaneElements = kTeamChunk / kTeamLanes;

// Returns the tree's node over a chunk to all lanes. Each lane passes four consecutive elements.
template <class Team>
RLK_DEVICE float tree_of_chunk(const Team& team, const float (&v)[kLaneElements]) {
  return sum_over_lanes<kTeamLanes>(team, add_rn(add_rn(v[0], v[1]), add_rn(v[2], v[3])));
}

// Returns the tree's node over f(first) ... f(first + 127). Elements from index `num` on are +0. `num` is small enough
// that Int does not overflow.
template <class Team, class Int, class F>
RLK_DEVICE float sum_of_chunk(const Team& team, Int first, Int num, const F& f) {
  float v[kLaneElements];
#pragma unroll
  for (int j = 0; j < kLaneElements; ++j) {
    const Int i = first + team.lane() * kLaneElements + j;
    v[j] = i < num ? f(i) : 0.0f;
  }
  return tree_of_chunk(team, v);
}

template <class Team, class Int, class F>
RLK_DEVICE float sum_of_team(const Team& team, Int num, const F& f) {
  TeamSumTree<Team> tree(team);
  float sum = 0.0f;
#pragma unroll 1
  for (Int first = 0; first < num; first += kTeamChunk) {
    sum = sum_of_chunk(team, first, num, f);
    if (num > kTeamChunk) tree.take(sum);
  }
  return finished_sum(num > kTeamChunk ? tree.finish() : sum);
}

// A team reads kBlockRows rows of 32 elements at a time, so that neighbouring lanes read neighbouring elements. Every
// lane of the block gets the sum.
constexpr int kBlockRows = 16;
template <class Block, class Int, class F>
RLK_DEVICE float sum_of_block(const Block& block, Int num, const F& f) {
  const auto& team = block.team();
  constexpr int kEach = kBlockRows * kTeamLanes;
  TeamSumTree<std::decay_t<decltype(team)>> tree(team);
#pragma unroll 1
  for (Int first = 0; first < num; first += block.teams() * kEach) {
    float v[kBlockRows];
#pragma unroll
    for (int r = 0; r < kBlockRows; ++r) {
      const Int i = first + block.number() * kEach + r * kTeamLanes + team.lane();
      v[r] = i < num ? f(i) : 0.0f;
    }
    const float of_team = sum_of_rows<kTeamLanes>(team, v);
    block.barrier();
    if (team.lane() == 0) block.sums()[block.number()] = of_team;
    block.barrier();
    tree.take(sum_over_lanes<kTeamLanes>(team, team.lane() < block.teams() ? block.sums()[team.lane()] : 0.0f));
  }
  return finished_sum(tree.finish());
}

}  // namespace rlk
