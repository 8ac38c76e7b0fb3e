// The inner loop of scatter_rewards, one copy per instruction set (scatter_rewards_lanes.cpp). Memory has any alignment.
#pragma once

#include "rlk/ops/scatter_rewards.h"
#include "token_tile.h"

namespace rlk::cpu {

struct ScatterRewardsLanes {
  void (*terms)(const ScatterRewardsParams& p, const TokenTile& tile, void* partial);
};

namespace baseline {
extern const ScatterRewardsLanes scatter_rewards_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const ScatterRewardsLanes scatter_rewards_lanes;
}
namespace avx512 {
extern const ScatterRewardsLanes scatter_rewards_lanes;
}
#endif

}  // namespace rlk::cpu
