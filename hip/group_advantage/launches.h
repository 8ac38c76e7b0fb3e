// Constants and arguments of group_advantage that host and kernels share.
#pragma once

#include "kernels/advantages/group_advantage_team.h"

namespace rlk::hip {

constexpr int kGroupAdvantageThreads = 256;  // threads per block: four waves, each for a group or a sequence
constexpr int kGroupsOfBlock = kGroupAdvantageThreads / 64;
constexpr int kGroupBatchThreads = 512;
constexpr int kGroupBatchTeams = kGroupBatchThreads / 64;
constexpr int kGroupBatchLdsBytes = kGroupBatchTeams * static_cast<int>(sizeof(MemberCounts) + sizeof(float));

}  // namespace rlk::hip
