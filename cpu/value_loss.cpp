// CPU backend of the operator `value_loss`.
#include "rlk/ops/value_loss.h"

#include "kernels/losses/value_check.h"
#include "kernels/losses/value_terms.h"
#include "rlk/backends.h"
#include "tokens/passes.h"
#include "value_loss_simd.h"

namespace rlk::cpu {
namespace {

const ValueLossLanes& lanes() { return RLK_CPU_LANES_IN_USE(value_loss_simd); }

}  // namespace

void value_loss(const ValueLossParams& p) {
  check_value_loss(p);
  const auto statistics = [&](const TokenTile& tile, void* partial) { lanes().statistics(p, tile, partial); };
  const auto terms = [&](const ValueFactors& factors, const TokenTile& tile, TilePartial<8>* const* partials) {
    lanes().terms(p, factors, tile, partials[0]);
  };
  const ValueShared shared = run_token_passes<ValueBatch, ValueTokenTerms>(p, statistics, terms);
  if (p.metrics == nullptr) return;
  const auto moments = [&](const CentralPair& pair, const TokenTile& tile, TilePartial<8>* const* partials) {
    lanes().moments(p, pair, tile, partials[0]);
  };
  run_token_passes<ValueMomentsBatch, CentralTerms<ValueMoments>>(p, nullptr, moments, shared);
}

}  // namespace rlk::cpu
