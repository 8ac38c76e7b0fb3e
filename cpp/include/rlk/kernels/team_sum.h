// Sums in chunks of 128 by teams of 32 lanes, shared by CUDA and HIP. A Team gives lane(), shuffle_xor of float and int, and
// writes(): whether this lane's stores are its own (a wave of 64 does a team's work twice). A Block gives a Team, its number in
// the block, how many there are, barrier(), and sums(): a float for each team that lanes share.
#pragma once

#include "rlk/math/ieee.h"

namespace rlk {

constexpr int kTeamLanes = 32;
constexpr int kTeamChunk = 128;
constexpr int kLaneElements = kTeamChunk / kTeamLanes;

// The tree over a chunk of which each lane has four elements that follow one another; all lanes get its sum.
template <class Team>
RLK_DEVICE float tree_of_chunk(const Team& team, const float (&v)[kLaneElements]) {
  float sum = add_rn(add_rn(v[0], v[1]), add_rn(v[2], v[3]));
#pragma unroll
  for (int h = 1; h < kTeamLanes; h *= 2) sum = add_rn(sum, team.shuffle_xor(sum, h));
  return sum;
}

// Of f(first), ... of 128 elements, +0 behind num, which is not so large that Int could overflow.
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
  float total = 0.0f;
#pragma unroll 1
  for (Int first = 0; first < num; first += kTeamChunk) {
    total = add_rn(total, sum_of_chunk(team, first, num, f));
  }
  return total;
}

// Chunks side by side; every lane of the block gets the sum.
template <class Block, class Int, class F>
RLK_DEVICE float sum_of_block(const Block& block, Int num, const F& f) {
  const Int step = block.teams() * kTeamChunk;
  float total = 0.0f;
#pragma unroll 1
  for (Int first = 0; first < num; first += step) {
    const float of_chunk = sum_of_chunk(block.team(), first + block.number() * kTeamChunk, num, f);
    block.barrier();
    if (block.team().lane() == 0) block.sums()[block.number()] = of_chunk;
    block.barrier();
#pragma unroll 1
    for (int t = 0; t < block.teams() && first + t * kTeamChunk < num; ++t) total = add_rn(total, block.sums()[t]);
  }
  return total;
}

}  // namespace rlk
