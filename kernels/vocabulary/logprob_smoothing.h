// Adds label smoothing to a row whose logprob and lse, or statistics, are already written. CUDA and HIP share this
// pass. The pass sums the row's z by the tree of rule 5 (docs/numerics.md). HBM bandwidth bounds the kernel, because
// the kernel reads each logit once more.
//
// A Block has kSmoothingThreads threads, and 32 neighbouring threads are a team. lane() is the index in the team, and
// number() is the index of the team. shuffle_xor(value, mask) works within the team, and barrier() for all threads.
// nodes() is an array of kMostSmoothingNodes floats in shared memory.
#pragma once

#include "kernels/vocabulary/logprob_groups.h"
#include "kernels/vocabulary/logprob_row.h"

namespace rlk {

constexpr int kSmoothingThreads = 256;
constexpr int kSmoothingTeams = kSmoothingThreads / 32;
constexpr int kTeamLeaves = 32 / kNumChains;  // each lane computes one chain
constexpr int kMostSmoothingNodes = kNumParts * kGroupLeaves * kGroupLeaves / kTeamLeaves;

template <class T, class Block>
RLK_DEVICE void smooth_row(const Block& block, const LogprobParams& p, const GroupGrid& grid, std::int64_t row) {
  if (target_of(p, row) == p.ignore_index) return;
  const float temperature = temperature_of(p, row);
  if (!is_temperature(temperature)) return;  // the row's results already show the status
  const float inverse = inverse_softcap(p);
  const typename T::Storage* const logits = row_of<T>(p, row) - p.vocab_start;
  float* const nodes = block.nodes();
  const int of_part = grid.leaves > kTeamLeaves ? grid.leaves / kTeamLeaves : 1, all = grid.num_parts * of_part;
#pragma unroll 1
  // all teams run this loop equally often, because both teams of a wave shuffle together
  for (int first = 0; first < all; first += kSmoothingTeams) {
    const int node = first + block.number(), part = node / of_part;
    const int leaf = node % of_part * kTeamLeaves + block.lane() / kNumChains;
    float sum = 0.0f;
    if (node < all && leaf < grid.leaves) {
      const int last = grid.part_last[part];
      const int begin = grid.part_first[part] + leaf * kLeafColumns + block.lane() % kNumChains;
#pragma unroll
      for (int i = 0; i < kLeafColumns / kNumChains; ++i) {
        const int column = begin + i * kNumChains;
        if (column < last) sum = add_rn(sum, scaled_logit(T::load(logits[column]), p.logit_scale, p.softcap, inverse));
      }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) sum = add_rn(sum, block.shuffle_xor(sum, distance));
    if (block.lane() == 0 && node < all) nodes[node] = sum;
  }
  const int thread = block.number() * 32 + block.lane();
#pragma unroll 1
  for (int distance = 1; distance < all; distance *= 2) {
    block.barrier();
    for (int i = thread * 2 * distance; i < all; i += kSmoothingThreads * 2 * distance) {
      nodes[i] = add_rn(nodes[i], nodes[i + distance]);
    }
  }
  if (thread != 0) return;  // thread 0 has the root
  const float sum_z = is_nan(nodes[0]) ? canonical_nan() : nodes[0];
  if (p.stats) {
    float* const stats = p.stats + row * kStatsFields;
    if (!is_nan(stats[0])) stats[3] = sum_z;
  } else {
    p.logprob[row] = smoothed_logprob(p.logprob[row], p.lse[row], sum_z, static_cast<float>(p.valid_vocab), temperature,
                                      p.label_smoothing);
  }
}

}  // namespace rlk
