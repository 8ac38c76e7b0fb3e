// CPU backend of policy_loss: tiles of sequences are spread over threads; sums over tiles and sequences follow in order.
#include "policy_loss.h"

#include <algorithm>
#include <vector>

#include "isa.h"
#include "policy_loss_lanes.h"
#include "rlk/kernels/policy_check.h"
#include "token_passes.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskSequences = 64;

const PolicyLossLanes& lanes() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::policy_loss_lanes;
    case Isa::kAvx2:
      return avx2::policy_loss_lanes;
    case Isa::kBaseline:
      break;
  }
#endif
  return baseline::policy_loss_lanes;
}

}  // namespace

void policy_loss(const PolicyLossParams& p) {
  check_policy_loss(p);
  const PolicySequences& q = p.sequences;
  check_cuts(q);
  const auto sequences = static_cast<std::size_t>(q.num_sequences);
  std::vector<TilePartial<kPolicySums>> groups[] = {partials_of(q)};
  auto& partials = groups[0];
  std::vector<SequenceSums<kPolicyStatistics>> statistics(sequences);
  PolicyTotals totals = {};
  if (needs_counts(p)) {
    if (!partials.empty()) {
      for_each_tile(q, [&](const TokenTile& tile, std::int64_t slot) {
        lanes().statistics(p, {}, tile, &partials[static_cast<std::size_t>(slot)]);
      });
    }
    parallel_for(q.num_sequences, kTaskSequences, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      for (std::int64_t s = begin; s < end; ++s) {
        statistics[static_cast<std::size_t>(s)] = sums_of_sequence(q, partials, s);
      }
    });
    for (const auto& of : statistics) {
      totals.tokens += of.count[kCountTokens];
      totals.sequences += of.count[kCountTokens] > 0;
    }
  }
  if (!partials.empty()) {
    for_each_tile(q, [&](const TokenTile& tile, std::int64_t slot) {
      const PolicyFactors factors = policy_factors(p, totals, statistics[static_cast<std::size_t>(tile.sequence)]);
      lanes().terms(p, factors, tile, &partials[static_cast<std::size_t>(slot)]);
    });
  }
  const FloatEnvironment environment;
  store_results(p, totals, sums_of_batch<PolicyBatch>(p, totals, groups));
}

void scale_gradients(const ScaleGradientsParams& p) {
  if (*p.factor == 1.0f) return;
  parallel_for(p.count, 16384, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (float* values : {p.first, p.second}) {
      if (values != nullptr) lanes().scale(values + begin, end - begin, *p.factor);
    }
  });
}

}  // namespace rlk::cpu
