// Passes over tokens. Tiles of sequences are spread over threads. The sums of tiles, then those of sequences, are added
// in a fixed order.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "../float_environment.h"
#include "../rows.h"
#include "../thread_pool.h"
#include "kernels/tokens/terms.h"
#include "tile.h"

namespace rlk::cpu {

// Writes the outputs of packed tokens outside every sequence.
inline void clear_rest(const Sequences& q, std::initializer_list<float*> outputs, float value = 0.0f) {
  const TokenSpan rest = rest_of(q);
  for (float* const to : outputs) {
    if (to != nullptr) std::fill_n(to + rest.begin, rest.length, value);
  }
}

inline std::vector<TilePartial<8>> partials_of(const Sequences& q) {
  return std::vector<TilePartial<8>>(q.num_slots() == 0 ? 0 : static_cast<std::size_t>(workspace_slots(q, kTile)));
}

// The tile of a sequence that begins at position `first`.
inline TokenTile tile_at(std::int64_t s, const TokenSpan& span, std::int64_t first) {
  const std::int64_t left = span.length - first;
  return {s, span.begin, first, left < kTilePositions ? static_cast<int>(left) : kTilePositions};
}
// Calls run(tile, slot) for every tile. `slot` is the index of the tile's results in an array of partials.
template <class F>
void for_each_tile(const Sequences& q, const F& run) {
  if (q.num_slots() == 0) return;
  const std::int64_t slots = workspace_slots(q, kTile);
  parallel_for(slots, 8, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t slot = begin; slot < end; ++slot) {
      const std::int64_t s = sequence_of_slot(q, slot, kTile);
      if (is_rest(q, s)) continue;
      const TokenSpan span = span_of(q, s);
      const std::int64_t first = (slot - first_slot(q, s, kTile)) * kTilePositions;
      if (first < span.length) run(tile_at(s, span, first), slot);
    }
  });
}
// Calls run(tile, slot) for every tile of sequence s.
template <class F>
void for_each_tile_of(const Sequences& q, std::int64_t s, const F& run) {
  const TokenSpan span = span_of(q, s);
  std::int64_t slot = first_slot(q, s, kTile);
  for (std::int64_t first = 0; first < span.length; first += kTilePositions) run(tile_at(s, span, first), slot++);
}

template <int kSums>
SequenceSums<kSums> sums_of_sequence(const Sequences& q, const std::vector<TilePartial<kSums>>& partials,
                                     std::int64_t s) {
  SequenceSums<kSums> of = {};
  SumTree<kTileLevels> trees[kSums];
  const std::int64_t first = first_slot(q, s, kTile), tiles = tiles_of(span_of(q, s).length, kTile);
  for (std::int64_t slot = first; slot < first + tiles; ++slot) {
    const TilePartial<kSums>& partial = partials[static_cast<std::size_t>(slot)];
    for (int i = 0; i < kSums; ++i) trees[i].take(partial.sum[i]);
    for (int i = 0; i < kTokenCounts; ++i) of.count[i] += partial.count[i];
    for (int i = 0; i < kTokenMaxima; ++i) of.maximum[i] = maximum_of(of.maximum[i], partial.maximum[i]);
  }
  for (int i = 0; i < kSums; ++i) of.sum[i] = trees[i].finish();
  return of;
}

// The sums, counts and maxima over all sequences of the batch. partials[g] has the results of each tile for group g of
// the sums.
template <class Batch>
TotalsOf<Batch> sums_of_batch(const typename Batch::Params& p, const TokenContext<Batch>& context,
                              const std::vector<TilePartial<8>> (&partials)[Batch::kGroups]) {
  const Sequences& q = Batch::sequences(p);
  TotalsOf<Batch> total = Batch::missing();
  SumTree<kSequenceLevels> trees[Batch::kSums];
  for (std::int64_t s = 0; s < q.num_sequences; ++s) {
    SequenceSums<8> groups[Batch::kGroups];
    for (int g = 0; g < Batch::kGroups; ++g) groups[g] = sums_of_sequence(q, partials[g], s);
    const TotalsOf<Batch> of = Batch::of_sequence(p, context, s, groups);
    for (int i = 0; i < Batch::kSums; ++i) trees[i].take(of.sum[i]);
    for (int i = 0; i < Batch::kCounts; ++i) total.count[i] += of.count[i];
    for (int i = 0; i < Batch::kMaxima; ++i) total.maximum[i] = maximum_of(total.maximum[i], of.maximum[i]);
  }
  for (int i = 0; i < Batch::kSums; ++i) total.sum[i] = trees[i].finish();
  return total;
}

// The passes of an operator with a Batch (kernels/tokens/terms.h). The first pass calls run_statistics(tile, partial).
// The pass that computes the terms `Terms` of all tokens calls run_terms(factors, tile, partials of each group).
// Returns the values that all sequences share, for use in a later pass.
template <class Batch, class Terms, class RunStatistics, class RunTerms>
typename Batch::Shared run_token_passes(const typename Batch::Params& p,
                                        [[maybe_unused]] const RunStatistics& run_statistics, const RunTerms& run_terms,
                                        typename Batch::Shared shared = {}) {
  constexpr std::int64_t kTaskSequences = 64;
  const Sequences& q = Batch::sequences(p);
  check_offset_values(q);
  std::vector<TilePartial<8>> partials[Batch::kGroups];
  for (auto& of_group : partials) of_group = partials_of(q);
  std::vector<typename Batch::Factors> factors(static_cast<std::size_t>(q.num_sequences));
  const TokenContext<Batch> context = {factors.data(), &shared};
  const bool has_pass_before = Batch::needs_pass_before(p);
  const auto terms = [&](const TokenTile& tile, std::int64_t slot) {
    TilePartial<8>* of_groups[Batch::kGroups];
    for (int g = 0; g < Batch::kGroups; ++g) of_groups[g] = &partials[g][static_cast<std::size_t>(slot)];
    run_terms(Batch::template factors<Terms>(p, context, has_pass_before, tile.sequence), tile, of_groups);
  };
  bool by_sequences = false;
  if constexpr (kHasStatistics<Batch>) {
    const auto statistics = [&](const TokenTile& tile, std::int64_t slot) {
      run_statistics(tile, &partials[0][static_cast<std::size_t>(slot)]);
    };
    const auto find_factors = [&](std::int64_t s) {
      factors[static_cast<std::size_t>(s)] = Batch::factors_of(p, s, sums_of_sequence(q, partials[0], s));
    };
    // If there are enough sequences for all threads, one thread runs both passes over a sequence while a cache holds
    // it.
    by_sequences = has_pass_before && !Batch::shares(p) && q.num_sequences >= 4 * num_threads();
    if (by_sequences) {
      const std::int64_t length = q.packed() ? q.num_tokens / q.num_sequences : q.num_tokens;
      parallel_for(q.num_sequences, rows_of_a_task(length), [&](std::int64_t begin, std::int64_t end) {
        const FloatEnvironment environment;
        for (std::int64_t s = begin; s < end; ++s) {
          for_each_tile_of(q, s, statistics);
          find_factors(s);
          for_each_tile_of(q, s, terms);
        }
      });
    } else if (has_pass_before) {
      for_each_tile(q, statistics);
      parallel_for(q.num_sequences, kTaskSequences, [&](std::int64_t begin, std::int64_t end) {
        const FloatEnvironment environment;
        for (std::int64_t s = begin; s < end; ++s) find_factors(s);
      });
      for (const auto& of : factors) {
        Batch::share(of, &shared, [](std::int64_t* to, std::int64_t count) { *to += count; });
      }
    }
  }
  if (!by_sequences) for_each_tile(q, terms);
  for (int i = 0; i < Terms::kOutputs; ++i) clear_rest(q, {Terms::output(p, i)});
  const FloatEnvironment environment;
  if (Batch::needs_sums(p)) {
    const TotalsOf<Batch> total = sums_of_batch<Batch>(p, context, partials);
    for (int i = 0; i < Batch::kResults; ++i) Batch::store(p, context, total, i);
  }
  return shared;
}

}  // namespace rlk::cpu
