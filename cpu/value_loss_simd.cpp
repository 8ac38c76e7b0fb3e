// The inner loops of the operator `value_loss`. CMake compiles this file once per instruction set.
#include "value_loss_simd.h"

#include "kernels/losses/value_terms.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

void statistics(const ValueLossParams& p, const TokenTile& tile, void* partial) {
  run_tile<ValueStatisticsTerms>(p, {}, tile, static_cast<TilePartial<8>*>(partial));
}

void terms(const ValueLossParams& p, const ValueFactors& factors, const TokenTile& tile, void* partial) {
  run_tile<ValueTokenTerms>(p, factors, tile, static_cast<TilePartial<8>*>(partial));
}

void moments(const ValueLossParams& p, const CentralPair& pair, const TokenTile& tile, void* partial) {
  run_tile<CentralTerms<ValueMoments>>(p, pair, tile, static_cast<TilePartial<8>*>(partial));
}

}  // namespace

const ValueLossLanes value_loss_simd = {statistics, terms, moments};

}  // namespace rlk::cpu::RLK_CPU_ISA
