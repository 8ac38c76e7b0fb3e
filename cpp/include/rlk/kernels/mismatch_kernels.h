// mismatch_metrics on a GPU, for every vendor, in up to three kernels, each after the one before it:
//   tokens    both groups of sums of each tile; the second reads the tokens from a cache
//   sums      the tree over tiles and sequences, by blocks of sequences; the metrics where one is enough
//   results   the tree over these blocks
#pragma once

#include "rlk/kernels/mismatch_terms.h"
#include "rlk/kernels/token_totals.h"

namespace rlk {

using MismatchTotals = TotalsOf<MismatchBatch>;

struct MismatchWorkspace {
  TilePartial<8>* partials[kMismatchGroups];  // [slots] each
  MismatchTotals* blocks;                     // [gather_blocks]
  std::int64_t bytes;

  MismatchWorkspace(const PolicySequences& q, int tile, void* memory) {
    WorkspaceParts parts(memory);
    for (auto& of_group : partials) of_group = parts.take<TilePartial<8>>(slots_of(q, tile));
    blocks = parts.take<MismatchTotals>(gather_blocks(q, gather_lanes(q, tile)));
    bytes = parts.bytes();
  }
};

template <class Gpu>
RLK_DEVICE void mismatch_tokens(const MismatchMetricsParams& p, const MismatchWorkspace& w, std::int64_t slots,
                                int tile, std::int64_t block, WaveResults* shared) {
  using Differences = MismatchTerms<kMismatchDifferences>;
  using Probabilities = MismatchTerms<kMismatchProbabilities>;
  token_tiles<Gpu, Differences>(p, w.partials[kMismatchDifferences], slots, tile, block, shared,
                                [](std::int64_t) { return typename Differences::Factors{}; });
  Gpu::barrier();  // until all have read what waves left in `shared`
  token_tiles<Gpu, Probabilities>(p, w.partials[kMismatchProbabilities], slots, tile, block, shared,
                                  [](std::int64_t) { return typename Probabilities::Factors{}; });
}

template <class Gpu>
RLK_DEVICE void mismatch_sums(const MismatchMetricsParams& p, const MismatchWorkspace& w, int tile, int lanes,
                              std::int64_t num_blocks, std::int64_t block, BatchSumsShared<MismatchBatch>* shared) {
  batch_sums<Gpu, MismatchBatch>(p, {}, w.partials, w.blocks, tile, lanes, num_blocks, block, shared);
}

template <class Gpu>
RLK_DEVICE void mismatch_results(const MismatchMetricsParams& p, const MismatchWorkspace& w, std::int64_t num_blocks,
                                 BatchResultsShared<MismatchBatch>* shared) {
  batch_results<Gpu, MismatchBatch>(p, {}, w.blocks, num_blocks, shared);
}

}  // namespace rlk
