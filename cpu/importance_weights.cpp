// CPU backend of the operator `importance_weights`.
#include "rlk/ops/importance_weights.h"

#include "importance_weights_simd.h"
#include "kernels/losses/rejection_terms.h"
#include "rlk/backends.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const ImportanceWeightsLanes& lanes() { return RLK_CPU_LANES_IN_USE(importance_weights_simd); }

}  // namespace

void importance_weights(const ImportanceWeightsParams& p) {
  check_importance_weights(p);
  const auto statistics = [&](const TokenTile& tile, void* partial) { lanes().statistics(p, tile, partial); };
  const auto terms = [&](const ImportanceFactors& factors, const TokenTile& tile, TilePartial<8>* const* partials) {
    lanes().terms(p, factors, tile, partials[0]);
  };
  const ImportanceBatch::Shared shared =
      run_token_passes<ImportanceBatch, ImportanceTokenTerms<ImportanceForm::kMeasured>>(p, statistics, terms);
  if (p.metrics != nullptr) {
    const auto moments = [&](const CentralPair& pair, const TokenTile& tile, TilePartial<8>* const* partials) {
      lanes().moments(p, pair, tile, partials[0]);
    };
    run_token_passes<ImportanceMomentsBatch, CentralTerms<ImportanceMoments>>(p, nullptr, moments, shared);
  }
  if (p.spec.normalize == 0 || shared.divisor == 1.0f) return;
  parallel_for(p.sequences.num_slots(), 16384, [&, by = shared.divisor](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    lanes().divide(p.weights + begin, end - begin, by);
  });
}

}  // namespace rlk::cpu
