// group_advantage: each wave computes one group. Both halves of the wave do the same work, and one half writes.
#pragma once

#include "hip/common/wave.h"
#include "hip/group_advantage/launches.h"

namespace rlk::hip {

struct HalfWave {
  RLK_DEVICE int lane() const { return thread_id() % kTeamLanes; }
  RLK_DEVICE bool writes() const { return thread_id() % kWave < kTeamLanes; }
  template <class T>
  RLK_DEVICE T shuffle_xor(T value, int mask) const {
    return rlk::hip::shuffle_xor(value, mask);
  }
};
struct WaveBlock {
  HalfWave half;
  RLK_DEVICE const HalfWave& team() const { return half; }
  RLK_DEVICE int number() const { return thread_id() / kWave; }
  RLK_DEVICE int teams() const { return kGroupBatchTeams; }
  RLK_DEVICE void barrier() const { block_barrier(); }
  RLK_DEVICE MemberCounts* counts() const { return reinterpret_cast<MemberCounts*>(lds()); }
  RLK_DEVICE float* sums() const { return reinterpret_cast<float*>(lds() + kGroupBatchTeams * sizeof(MemberCounts)); }
};

RLK_DEVICE std::int64_t wave_of_launch(std::int64_t first_block) {
  return (first_block + block_id_x()) * kGroupsOfBlock + thread_id() / kWave;
}

}  // namespace rlk::hip
