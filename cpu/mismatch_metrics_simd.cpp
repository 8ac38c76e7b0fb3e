// The inner loops of the operator `mismatch_metrics`. CMake compiles this file once per instruction set.
#include "mismatch_metrics_simd.h"

#include "kernels/losses/mismatch_terms.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

template <int kGroup>
void group(const MismatchMetricsParams& p, const TokenTile& tile, void* partial) {
  run_tile<MismatchTerms<kGroup>>(p, {}, tile, static_cast<TilePartial<8>*>(partial));
}

void terms(const MismatchMetricsParams& p, const TokenTile& tile, void* differences, void* probabilities) {
  group<kMismatchDifferences>(p, tile, differences);
  group<kMismatchProbabilities>(p, tile, probabilities);
}

void moments(const MismatchMetricsParams& p, const MismatchPair& pair, const TokenTile& tile, void* partial) {
  run_tile<CentralTerms<MismatchMoments>>(p, pair, tile, static_cast<TilePartial<8>*>(partial));
}

}  // namespace

const MismatchMetricsLanes mismatch_metrics_simd = {terms, moments};

}  // namespace rlk::cpu::RLK_CPU_ISA
