// CPU backend of mismatch_metrics: tiles of sequences are spread over threads; sums over tiles and sequences follow in
// order.
#include "mismatch_metrics.h"

#include <vector>

#include "isa.h"
#include "mismatch_metrics_lanes.h"
#include "rlk/kernels/mismatch_terms.h"
#include "token_passes.h"

namespace rlk::cpu {
namespace {

const MismatchMetricsLanes& lanes() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::mismatch_metrics_lanes;
    case Isa::kAvx2:
      return avx2::mismatch_metrics_lanes;
    case Isa::kBaseline:
      break;
  }
#endif
  return baseline::mismatch_metrics_lanes;
}

}  // namespace

void mismatch_metrics(const MismatchMetricsParams& p) {
  check_mismatch_metrics(p);
  const PolicySequences& q = p.sequences;
  check_cuts(q);
  std::vector<TilePartial<8>> groups[] = {partials_of(q), partials_of(q)};
  if (q.num_slots() > 0) {
    for_each_tile(q, [&](const TokenTile& tile, std::int64_t slot) {
      const auto at = static_cast<std::size_t>(slot);
      lanes().terms(p, tile, &groups[kMismatchDifferences][at], &groups[kMismatchProbabilities][at]);
    });
  }
  const FloatEnvironment environment;
  MismatchBatch::store(p, {}, sums_of_batch<MismatchBatch>(p, {}, groups));
}

}  // namespace rlk::cpu
