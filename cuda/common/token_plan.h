// How passes over tokens are cut into tiles on CUDA. Any plan serves any call, with the same bits.
#pragma once

#include "rlk/kernels/token_workspace.h"

namespace rlk::cuda {

// 2^tile positions of a sequence are a warp's (7: sequences are short) or a block's.
struct TokenPlan {
  int tile = 0;
};
constexpr TokenPlan kTokenPlans[] = {{7}, {10}, {11}, {12}, {13}};
constexpr int kWarpTile = 7, kLeastPlanTile = 10, kMostPlanTile = 13;
constexpr std::int64_t kWarpTokens = 256;  // sequences of at most so many are warps

inline TokenPlan choose_token_plan(const Sequences& q, int multiprocessors) {
  const std::int64_t mean = mean_length(q);
  if (mean <= kWarpTokens) return {kWarpTile};
  int tile = kLeastPlanTile;
  // If a sequence exceeds a tile by little, a tile of twice the size would be half empty and not worth it.
  while (tile < kMostPlanTile && (std::int64_t{17} << tile) / 16 < mean &&
         2 * workspace_slots(q, tile + 1) >= std::int64_t{3} * multiprocessors) {
    ++tile;
  }
  return {tile};
}
// Bounds every plan that is chosen, whatever the device: slots and blocks are most where tiles are least.
template <class Batch>
std::int64_t most_workspace_bytes(const Sequences& q) {
  return TokenWorkspace<Batch>(q, mean_length(q) <= kWarpTokens ? kWarpTile : kLeastPlanTile, nullptr).bytes;
}

}  // namespace rlk::cuda
