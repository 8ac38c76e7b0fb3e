// How passes over tokens are cut into tiles: ways to serve a call, all with the same bits.
#pragma once

#include "rlk/kernels/policy_workspace.h"

namespace rlk::cuda {

// 2^tile positions of a sequence are a warp's (7: sequences are short) or a block's. Any serves any call.
struct PolicyPlan {
  int tile = 0;
};
constexpr PolicyPlan kPolicyPlans[] = {{7}, {10}, {11}, {12}, {13}};

inline std::int64_t mean_length(const PolicySequences& q) {
  return q.packed() && q.num_sequences > 0 ? q.num_tokens / q.num_sequences + 1 : q.num_tokens;
}
constexpr int kWarpTile = 7, kLeastPlanTile = 10, kMostPlanTile = 13;
constexpr std::int64_t kWarpTokens = 256;  // sequences of at most so many are warps

inline PolicyPlan choose_plan(const PolicySequences& q, int multiprocessors) {
  if (mean_length(q) <= kWarpTokens) return {kWarpTile};
  int tile = kLeastPlanTile;
  while (tile < kMostPlanTile && (std::int64_t{1} << tile) < mean_length(q) &&
         2 * workspace_slots(q, tile + 1) >= std::int64_t{3} * multiprocessors) {
    ++tile;
  }
  return {tile};
}
// Whatever the device, and so the plan: slots are most where tiles are least.
inline std::int64_t most_workspace_bytes(const PolicySequences& q) {
  return PolicyWorkspace(q, mean_length(q) <= kWarpTokens ? kWarpTile : kLeastPlanTile, nullptr).bytes +
         static_cast<std::int64_t>(sizeof(PolicyTotalSums)) * q.num_sequences;
}

}  // namespace rlk::cuda
