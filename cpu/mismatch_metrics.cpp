// CPU backend of the operator `mismatch_metrics`.
#include "rlk/ops/mismatch_metrics.h"

#include "kernels/losses/mismatch_terms.h"
#include "mismatch_metrics_simd.h"
#include "rlk/backends.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const MismatchMetricsLanes& lanes() { return RLK_CPU_LANES_IN_USE(mismatch_metrics_simd); }

}  // namespace

void mismatch_metrics(const MismatchMetricsParams& p) {
  check_mismatch_metrics(p);
  const auto terms = [&](const MismatchFactors&, const TokenTile& tile, TilePartial<8>* const* partials) {
    lanes().terms(p, tile, partials[kMismatchDifferences], partials[kMismatchProbabilities]);
  };
  const auto shared = run_token_passes<MismatchBatch, MismatchTerms<kMismatchDifferences>>(p, nullptr, terms);
  const auto moments = [&](const MismatchPair& pair, const TokenTile& tile, TilePartial<8>* const* partials) {
    lanes().moments(p, pair, tile, partials[0]);
  };
  run_token_passes<MismatchMomentsBatch, CentralTerms<MismatchMoments>>(p, nullptr, moments, shared);
}

}  // namespace rlk::cpu
