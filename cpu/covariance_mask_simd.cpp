// The inner loops of the operator `covariance_mask`. CMake compiles this file once per instruction set.
#include "covariance_mask_simd.h"

#include "kernels/losses/covariance_terms.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

void sums(const CovarianceMaskParams& p, const TokenTile& tile, void* partial) {
  run_tile<CovarianceSumTerms>(p, {}, tile, static_cast<TilePartial<8>*>(partial));
}

void covariances(const CovarianceMaskParams& p, float mean_advantage, float mean_logprob, const TokenTile& tile) {
  run_tile<CovarianceTerms>(p, {mean_advantage, mean_logprob}, tile, nullptr);
}

}  // namespace

const CovarianceMaskLanes covariance_mask_simd = {sums, covariances};

}  // namespace rlk::cpu::RLK_CPU_ISA
