// importance_weights on a GPU, for every vendor, in up to six kernels, each after the one before it:
//   statistics   where tokens need something of their sequence: the sums of each tile
//   sequences    and of each sequence, its weight and whether it is kept
//   tokens       weights and what is kept; the one kernel of single tokens' weights and criteria
//   sums         with normalize: the tree over tiles and sequences, by blocks of sequences; the mean where one is enough
//   results      the tree over these blocks
//   divide       by the mean
#pragma once

#include "rlk/kernels/rejection_terms.h"
#include "rlk/kernels/token_totals.h"

namespace rlk {

using ImportanceTotals = TotalsOf<ImportanceBatch>;

struct ImportanceWorkspace {
  TilePartial<8>* partials;    // [slots]: of statistics, then of tokens
  ImportanceFactors* factors;  // [num_sequences]
  ImportanceTotals* blocks;    // [gather_blocks]
  float* divisor;              // [1]
  std::int64_t bytes;

  ImportanceWorkspace(const PolicySequences& q, int tile, void* memory) {
    WorkspaceParts parts(memory);
    partials = parts.take<TilePartial<8>>(slots_of(q, tile));
    factors = parts.take<ImportanceFactors>(q.num_sequences);
    blocks = parts.take<ImportanceTotals>(gather_blocks(q, gather_lanes(q, tile)));
    divisor = parts.take<float>(1);
    bytes = parts.bytes();
  }
  RLK_HD ImportanceBatch::Context context() const { return {factors, divisor}; }
};

template <class Gpu>
RLK_DEVICE void importance_statistics(const ImportanceWeightsParams& p, const ImportanceWorkspace& w,
                                      std::int64_t slots, int tile, std::int64_t block, WaveResults* shared) {
  token_tiles<Gpu, ImportanceStatisticsTerms>(p, w.partials, slots, tile, block, shared,
                                              [](std::int64_t) { return ImportanceStatisticsTerms::Factors{}; });
}

template <class Gpu>
RLK_DEVICE void importance_sequences(const ImportanceWeightsParams& p, const ImportanceWorkspace& w, int tile,
                                     int lanes, std::int64_t block, GatheredSums* shared) {
  sums_of_sequences<Gpu>(p.sequences, tile, lanes, block, w.partials, shared);
  const int group = Gpu::thread(), groups = kGatherLeaves >> lanes;
  const std::int64_t s = block * groups + group;
  if (group >= groups || s >= p.sequences.num_sequences) return;
  in_global(w.factors)[s] = importance_factors(p, s, gathered(*shared, group));
}

template <class Gpu>
RLK_DEVICE void importance_tokens(const ImportanceWeightsParams& p, const ImportanceWorkspace& w, std::int64_t slots,
                                  int tile, std::int64_t block, WaveResults* shared) {
  const bool of_sequence = needs_statistics(p.spec);
  token_tiles<Gpu, ImportanceTokenTerms>(p, w.partials, slots, tile, block, shared, [&](std::int64_t s) {
    if (of_sequence) return in_global(w.factors)[s];
    ImportanceFactors f;
    f.broken = p.sequences.packed() && !are_cuts_good(p.sequences, s);
    return f;
  });
}

template <class Gpu>
RLK_DEVICE void importance_sums(const ImportanceWeightsParams& p, const ImportanceWorkspace& w, int tile, int lanes,
                                std::int64_t num_blocks, std::int64_t block, BatchSumsShared<ImportanceBatch>* shared) {
  batch_sums<Gpu, ImportanceBatch>(p, w.context(), {w.partials}, w.blocks, tile, lanes, num_blocks, block, shared);
}

template <class Gpu>
RLK_DEVICE void importance_results(const ImportanceWeightsParams& p, const ImportanceWorkspace& w,
                                   std::int64_t num_blocks, BatchResultsShared<ImportanceBatch>* shared) {
  batch_results<Gpu, ImportanceBatch>(p, w.context(), w.blocks, num_blocks, shared);
}

// Values of `block`, of `blocks`. Nothing is read where the divisor is 1.
template <class Gpu>
RLK_DEVICE void importance_divide(const ImportanceWeightsParams& p, const ImportanceWorkspace& w, std::int64_t count,
                                  std::int64_t block, std::int64_t blocks) {
  const float divisor = *in_global(w.divisor);
  if (divisor == 1.0f) return;
  map_values<Gpu>(p.weights, count, block, blocks, [&](const auto& x) { return normalized(x, divisor); });
}

}  // namespace rlk
