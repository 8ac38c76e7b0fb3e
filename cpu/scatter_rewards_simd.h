// The inner loop of the operator `scatter_rewards`. CMake compiles scatter_rewards_simd.cpp once per instruction set.
// The arrays may have any alignment.
#pragma once

#include "lanes.h"
#include "rlk/ops/scatter_rewards.h"
#include "tokens/tile.h"

namespace rlk::cpu {

struct ScatterRewardsLanes {
  void (*terms)(const ScatterRewardsParams& p, const TokenTile& tile, void* partial);
};

RLK_CPU_LANES(ScatterRewardsLanes, scatter_rewards_simd)

}  // namespace rlk::cpu
