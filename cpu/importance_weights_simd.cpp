// The inner loops of the operator `importance_weights`. CMake compiles this file once per instruction set.
#include "importance_weights_simd.h"

#include "kernels/losses/rejection_terms.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

void statistics(const ImportanceWeightsParams& p, const TokenTile& tile, void* partial) {
  run_tile<ImportanceStatisticsTerms>(p, {}, tile, static_cast<TilePartial<8>*>(partial));
}

void terms(const ImportanceWeightsParams& p, const ImportanceFactors& factors, const TokenTile& tile, void* partial) {
  auto* const to = static_cast<TilePartial<8>*>(partial);
  switch (form_of(p)) {
    case ImportanceForm::kAlone:
      return run_tile<ImportanceTokenTerms<ImportanceForm::kAlone>>(p, factors, tile, nullptr);
    case ImportanceForm::kNormalized:
      return run_tile<ImportanceTokenTerms<ImportanceForm::kNormalized>>(p, factors, tile, to);
    case ImportanceForm::kMeasured:
      return run_tile<ImportanceTokenTerms<ImportanceForm::kMeasured>>(p, factors, tile, to);
  }
}

void moments(const ImportanceWeightsParams& p, const CentralPair& pair, const TokenTile& tile, void* partial) {
  run_tile<CentralTerms<ImportanceMoments>>(p, pair, tile, static_cast<TilePartial<8>*>(partial));
}

void divide(float* values, std::int64_t count, float divisor) {
  for (std::int64_t k = 0; k < count; k += kLanes) {
    const int left = count - k < kLanes ? static_cast<int>(count - k) : kLanes;
    store_tokens(values + k, left, normalized(load_tokens(values + k, left), divisor));
  }
}

}  // namespace

const ImportanceWeightsLanes importance_weights_simd = {statistics, terms, moments, divide};

}  // namespace rlk::cpu::RLK_CPU_ISA
