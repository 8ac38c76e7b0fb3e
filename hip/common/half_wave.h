// Teams of 32 lanes, for sums whose order is defined over 32 virtual lanes. A wave has two teams.
#pragma once

#include "hip/common/wave.h"

namespace rlk::hip {

constexpr int kTeam = 32;

RLK_DEVICE int team_lane() { return thread_id() % kTeam; }
RLK_DEVICE int team_id() { return thread_id() / kTeam; }  // the team's index in the block

// Returns `value` of the team's lane `lane`. Lanes may pass different values of `lane`.
RLK_DEVICE float shuffle_team(float value, int lane RLK_HERE_PARAMETER) {
  return shuffle_xor(value, team_lane() ^ lane RLK_HERE_ARGUMENT);
}
// Returns one bit for each lane of the team.
RLK_DEVICE std::uint32_t ballot_team(bool value RLK_HERE_PARAMETER) {
  const std::uint64_t all = ballot(value RLK_HERE_ARGUMENT);
  return static_cast<std::uint32_t>(team_id() % 2 == 0 ? all : all >> kTeam);
}

}  // namespace rlk::hip
