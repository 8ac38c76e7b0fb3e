// CPU backend of importance_weights: tiles of sequences are spread over threads; sums over tiles and sequences follow in
// order.
#include "importance_weights.h"

#include <vector>

#include "importance_weights_lanes.h"
#include "isa.h"
#include "rlk/kernels/rejection_terms.h"
#include "token_passes.h"

namespace rlk::cpu {
namespace {

const ImportanceWeightsLanes& lanes() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::importance_weights_lanes;
    case Isa::kAvx2:
      return avx2::importance_weights_lanes;
    case Isa::kBaseline:
      break;
  }
#endif
  return baseline::importance_weights_lanes;
}

}  // namespace

void importance_weights(const ImportanceWeightsParams& p) {
  check_importance_weights(p);
  const PolicySequences& q = p.sequences;
  check_cuts(q);
  if (q.num_slots() == 0) return;
  std::vector<TilePartial<8>> groups[] = {partials_of(q)};
  auto& partials = groups[0];
  std::vector<ImportanceFactors> factors(static_cast<std::size_t>(q.num_sequences));
  if (needs_statistics(p.spec)) {
    for_each_tile(q, [&](const TokenTile& tile, std::int64_t slot) {
      lanes().statistics(p, tile, &partials[static_cast<std::size_t>(slot)]);
    });
    const FloatEnvironment environment;
    for (std::int64_t s = 0; s < q.num_sequences; ++s) {
      factors[static_cast<std::size_t>(s)] = importance_factors(p, s, sums_of_sequence(q, partials, s));
    }
  }
  for_each_tile(q, [&](const TokenTile& tile, std::int64_t slot) {
    lanes().terms(p, factors[static_cast<std::size_t>(tile.sequence)], tile, &partials[static_cast<std::size_t>(slot)]);
  });
  if (p.spec.normalize == 0) return;
  float divisor = 1.0f;
  {
    const FloatEnvironment environment;
    const ImportanceBatch::Context context = {factors.data(), &divisor};
    ImportanceBatch::store(p, context, sums_of_batch<ImportanceBatch>(p, context, groups));
  }
  if (divisor == 1.0f) return;
  parallel_for(q.num_slots(), 16384, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    lanes().divide(p.weights + begin, end - begin, divisor);
  });
}

}  // namespace rlk::cpu
