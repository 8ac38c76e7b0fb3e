// Losses over tokens on the CPU: tiles of sequences are spread over threads; sums over tiles and sequences follow in order.
#pragma once

#include <algorithm>
#include <vector>

#include "rlk/kernels/policy_terms.h"
#include "token_passes.h"

namespace rlk::cpu {

// statistics(p, {}, tile, partial) of the pass before, terms(p, factors, tile, partial) of the pass over tokens.
template <class Params, class Pass>
void run_policy_passes(const Params& p, const Pass& run_statistics, const Pass& run_terms) {
  constexpr std::int64_t kTaskSequences = 64;
  const PolicySequences& q = p.sequences;
  check_cuts(q);
  const auto sequences = static_cast<std::size_t>(q.num_sequences);
  std::vector<TilePartial<kPolicySums>> partials(
      q.num_slots() == 0 ? 0 : static_cast<std::size_t>(workspace_slots(q, kTile)));
  std::vector<SequenceSums<kPolicyStatistics>> statistics(sequences);
  PolicyTotals totals = {};
  if (needs_counts(p)) {
    if (!partials.empty()) {
      for_each_tile(q, [&](const TokenTile& tile, std::int64_t slot) {
        run_statistics(p, {}, tile, &partials[static_cast<std::size_t>(slot)]);
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
      run_terms(p, factors, tile, &partials[static_cast<std::size_t>(slot)]);
    });
  }
  const FloatEnvironment environment;
  PolicyTotalSums sum = {};
  SumTree<kSequenceLevels> trees[kPolicyTotalSums];
  for (std::int64_t s = 0; s < q.num_sequences; ++s) {
    const PolicyTotalSums of = total_of(p, totals, s, sums_of_sequence(q, partials, s));
    for (int i = 0; i < kPolicyTotalSums; ++i) trees[i].take(of.sum[i]);
    for (int i = 0; i < kPolicyTotalCounts; ++i) sum.count[i] += of.count[i];
    for (int i = 0; i < kTokenMaxima; ++i) sum.maximum[i] = maximum_of(sum.maximum[i], of.maximum[i]);
  }
  for (int i = 0; i < kPolicyTotalSums; ++i) sum.sum[i] = trees[i].finish();
  store_results(p, totals, sum);
}

}  // namespace rlk::cpu
