// The inner loop of the operator `scatter_rewards`. CMake compiles this file once per instruction set.
#include "scatter_rewards_simd.h"

#include "kernels/advantages/reward_terms.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

void terms(const ScatterRewardsParams& p, const TokenTile& tile, void* partial) {
  run_tile<RewardTokenTerms>(p, RewardTokenTerms::factors(p, tile.sequence), tile,
                             static_cast<TilePartial<8>*>(partial));
}

}  // namespace

const ScatterRewardsLanes scatter_rewards_simd = {terms};

}  // namespace rlk::cpu::RLK_CPU_ISA
