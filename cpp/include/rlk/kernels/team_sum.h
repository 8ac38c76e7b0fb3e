// Sums in chunks of 128 by teams of 32 lanes, shared by CUDA and HIP. A Team gives lane(), shuffle_xor of float and int, and
// writes(): whether this lane's stores are its own (a wave of 64 does a team's work twice). A Block gives a Team, its number in
// the block, how many there are, barrier(), and sums(): kBlockChunks floats for each team that lanes share.
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

// Chunks side by side, kBlockChunks of a team at a time; every lane of the block gets the sum. What is missing in the last
// round adds +0, which changes no bit.
constexpr int kBlockChunks = 4;
template <class Block, class Int, class F>
RLK_DEVICE float sum_of_block(const Block& block, Int num, const F& f) {
  constexpr int kTogether = 4 * kBlockChunks;  // sums read together; teams come in fours
  const Int chunks = block.teams() * kBlockChunks;
  float total = 0.0f;
#pragma unroll 1
  for (Int first = 0; first < num; first += chunks * kTeamChunk) {
    float of_chunk[kBlockChunks];
#pragma unroll
    for (int c = 0; c < kBlockChunks; ++c) {
      of_chunk[c] = sum_of_chunk(block.team(), first + (c * block.teams() + block.number()) * kTeamChunk, num, f);
    }
    block.barrier();
#pragma unroll
    for (int c = 0; c < kBlockChunks; ++c) {
      if (block.team().lane() == c) block.sums()[c * block.teams() + block.number()] = of_chunk[c];
    }
    block.barrier();
#pragma unroll 1
    for (Int t = 0; t < chunks && first + t * kTeamChunk < num; t += kTogether) {
#pragma unroll
      for (int c = 0; c < kTogether; ++c) total = add_rn(total, block.sums()[t + c]);
    }
  }
  return total;
}

}  // namespace rlk
