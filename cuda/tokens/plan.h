// The tiles of passes over tokens on CUDA. Any plan serves any call, with the same bits.
#pragma once

#include "kernels/tokens/workspace.h"

namespace rlk::cuda {

// A tile has 2^tile positions of a sequence. A block computes it, or a warp where tile is 7, for short sequences.
struct TokenPlan {
  int tile = 0;
};
constexpr TokenPlan kTokenPlans[] = {{7}, {10}, {11}, {12}, {13}};
constexpr int kWarpTile = 7, kLeastPlanTile = 10, kMostPlanTile = 13;
constexpr std::int64_t kWarpTokens = 256;  // sequences of at most this many tokens go to warps

inline TokenPlan choose_token_plan(const Sequences& q, int multiprocessors) {
  const std::int64_t mean = mean_length(q);
  if (mean <= kWarpTokens) return {kWarpTile};
  int tile = kLeastPlanTile;
  // If a sequence exceeds a tile by little, a tile of twice the size would be half empty, so the plan keeps the smaller
  // tile.
  while (tile < kMostPlanTile && (std::int64_t{17} << tile) / 16 < mean &&
         2 * workspace_slots(q, tile + 1) >= std::int64_t{3} * multiprocessors) {
    ++tile;
  }
  return {tile};
}
// Bounds every plan that may be chosen on any device: the smallest tiles make the most slots and blocks.
template <class Batch>
std::int64_t most_workspace_bytes(const Sequences& q) {
  return TokenWorkspace<Batch>(q, mean_length(q) <= kWarpTokens ? kWarpTile : kLeastPlanTile, nullptr).bytes;
}

}  // namespace rlk::cuda
