// The inner loops of the operator `policy_loss`. CMake compiles this file once per instruction set.
#include "policy_loss_simd.h"

#include "kernels/losses/policy_terms.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

void statistics(const PolicyLossParams& p, const TokenTile& tile, void* partial) {
  run_tile<PolicyStatisticsTerms>(p, {}, tile, static_cast<TilePartial<8>*>(partial));
}

void terms(const PolicyLossParams& p, const PolicyFactors& factors, const TokenTile& tile, void* partial) {
  run_tile<PolicyLossTerms>(p, factors, tile, static_cast<TilePartial<8>*>(partial));
}

void scale(float* values, std::int64_t count, float factor) {
  const Floats f = broadcast<Floats>(factor);
  for (std::int64_t k = 0; k < count; k += kLanes) {
    const int left = count - k < kLanes ? static_cast<int>(count - k) : kLanes;
    store_tokens(values + k, left, canonical(mul_rn(load_tokens(values + k, left), f)));
  }
}

}  // namespace

const PolicyLossLanes policy_loss_simd = {statistics, terms, scale};

}  // namespace rlk::cpu::RLK_CPU_ISA
