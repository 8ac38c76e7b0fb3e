// The tiles of passes over tokens on CUDA. Every plan supports every call, with the same bits.
#pragma once

#include "kernels/tokens/workspace.h"

namespace rlk::cuda {

// A tile has 2^tile positions of a sequence. If `tile` is 7, for short sequences, a warp computes a tile; otherwise a
// block does.
struct TokenPlan {
  int tile = 0;
};
constexpr TokenPlan kTokenPlans[] = {{7}, {10}, {11}, {12}, {13}};
constexpr int kWarpTile = 7, kLeastPlanTile = 10, kMostPlanTile = 13;
constexpr std::int64_t kWarpTokens = 256;  // a warp takes sequences of at most this many tokens

inline TokenPlan choose_token_plan(const Sequences& q, int multiprocessors) {
  const std::int64_t mean = mean_length(q);
  if (mean <= kWarpTokens) return {kWarpTile};
  int tile = kLeastPlanTile;
  // If a sequence is only a little longer than a tile, a tile of twice the size would be almost half empty. So the plan
  // then keeps the smaller tile.
  while (tile < kMostPlanTile && (std::int64_t{17} << tile) / 16 < mean &&
         2 * workspace_slots(q, tile + 1) >= std::int64_t{3} * multiprocessors) {
    ++tile;
  }
  return {tile};
}
// An upper bound for every plan that may be chosen on any device: the smallest tiles give the most slots and blocks.
template <class Batch>
std::int64_t most_workspace_bytes(const Sequences& q) {
  return TokenWorkspace<Batch>(q, mean_length(q) <= kWarpTokens ? kWarpTile : kLeastPlanTile, nullptr).bytes;
}

}  // namespace rlk::cuda
