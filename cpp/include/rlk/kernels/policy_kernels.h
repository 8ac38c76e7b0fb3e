// policy_loss on a GPU, for every vendor, in up to five kernels, each after the one before it:
//   statistics   where tokens need sums over their sequence, or their number: those of each tile
//   sequences    and of each sequence, with what follows for its tokens; counts over all of them
//   tokens       the pass over tokens: gradients, and each tile's sums
//   sums         the tree over tiles and sequences, by blocks of sequences; the results where one is enough
//   results      the tree over these blocks
// A loss of single tokens with a denominator takes the last three or two.
#pragma once

#include "rlk/kernels/policy_workspace.h"
#include "rlk/kernels/token_totals.h"

namespace rlk {

template <class Gpu>
RLK_DEVICE void policy_statistics(const PolicyLossParams& p, const PolicyWorkspace& w, std::int64_t slots, int tile,
                                  std::int64_t block, WaveResults* shared) {
  if (block == 0 && Gpu::thread() == 0) *in_global(w.totals) = PolicyTotals{0, 0};
  const PolicyFactors none;
  token_tiles<Gpu, PolicyStatisticsTerms>(p, w.partials, slots, tile, block, shared,
                                          [&](std::int64_t) { return none; });
}

template <class Gpu>
RLK_DEVICE void policy_sequences(const PolicyLossParams& p, const PolicyWorkspace& w, int tile, int lanes,
                                 std::int64_t block, GatheredSums* shared) {
  sums_of_sequences<Gpu>(p.sequences, tile, lanes, block, w.partials, shared);
  const int group = Gpu::thread(), groups = kGatherLeaves >> lanes;
  const std::int64_t s = block * groups + group;
  if (group >= groups || s >= p.sequences.num_sequences) return;
  const PolicyFactors f = policy_factors(p, PolicyTotals{0, 0}, gathered(*shared, group));
  in_global(w.factors)[s] = f;
  if (f.tokens == 0) return;
  Gpu::count_on(in_global(&w.totals->tokens), f.tokens);
  Gpu::count_on(in_global(&w.totals->sequences), 1);
}

template <class Gpu, PolicyForm kForm>
RLK_DEVICE void policy_tokens(const PolicyLossParams& p, const PolicyWorkspace& w, std::int64_t slots, int tile,
                              std::int64_t block, WaveResults* shared) {
  const bool counted = needs_counts(p);
  token_tiles<Gpu, PolicyTokenTerms<kForm>>(p, w.partials, slots, tile, block, shared, [&](std::int64_t s) {
    PolicyFactors f;
    PolicyTotals totals = {0, 0};
    if (counted) {
      if constexpr (kForm == PolicyForm::kSequences) {
        f = in_global(w.factors)[s];
      } else {
        f.tokens = in_global(w.factors)[s].tokens;
      }
      totals = *in_global(w.totals);
    }
    set_weights(p, totals, f.tokens, &f);
    return f;
  });
}

template <class Gpu>
RLK_DEVICE void policy_sums(const PolicyLossParams& p, const PolicyWorkspace& w, int tile, int lanes,
                            std::int64_t num_blocks, std::int64_t block, BatchSumsShared<PolicyBatch>* shared) {
  PolicyTotals totals = {0, 0};
  if (needs_totals(p)) totals = *in_global(w.totals);
  batch_sums<Gpu, PolicyBatch>(p, totals, {w.partials}, w.blocks, tile, lanes, num_blocks, block, shared);
}

template <class Gpu>
RLK_DEVICE void policy_results(const PolicyLossParams& p, const PolicyWorkspace& w, std::int64_t num_blocks,
                               BatchResultsShared<PolicyBatch>* shared) {
  PolicyTotals totals = {0, 0};
  if (needs_totals(p)) totals = *in_global(w.totals);
  batch_results<Gpu, PolicyBatch>(p, totals, w.blocks, num_blocks, shared);
}

// Values of `block`, of `blocks`. Nothing is read where the factor is 1.
template <class Gpu>
RLK_DEVICE void scale_values(const ScaleGradientsParams& p, std::int64_t block, std::int64_t blocks) {
  const float factor = *in_global(p.factor);
  if (factor == 1.0f) return;
  for (float* const values : {p.first, p.second}) {
    map_values<Gpu>(values, p.count, block, blocks, [&](const auto& x) {
      using F = std::decay_t<decltype(x)>;
      return canonical(mul_rn(x, broadcast<F>(factor)));
    });
  }
}

}  // namespace rlk
