// Passes over tokens on a GPU, for every vendor, of an operator by its Batch (token_terms.h), each after the one before:
//   statistics   where tokens need something of their sequence, or numbers of tokens: the sums of each tile
//   sequences    and of each sequence, with what follows for its tokens; counts over all of them
//   tokens       the terms of tokens: what they give, and each tile's sums
//   sums         the tree over tiles and sequences, by blocks of sequences, or a block that has them all; the results where one
//                block is enough
//   results      the tree over these blocks: by whoever knows that they are there
// Tokens that need nothing of their sequence take the last three or two; without sums there is `tokens` alone.
// map_values: an elementwise pass.
#pragma once

#include <type_traits>

#include "rlk/kernels/token_kernels.h"
#include "rlk/kernels/token_workspace.h"

namespace rlk {

static_assert(kMostGatherLanes == kGatherLanes);

template <class Gpu, class Batch>
RLK_DEVICE void token_statistics(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, std::int64_t slots,
                                 int tile, std::int64_t block, WaveResults* shared) {
  using Statistics = typename Batch::Statistics;
  if (block == 0 && Gpu::thread() == 0) *in_global(w.shared) = typename Batch::Shared{};
  token_tiles<Gpu, Statistics>(p, w.partials[0], slots, tile, block, shared,
                               [](std::int64_t) { return typename Statistics::Factors{}; });
}

template <class Gpu, class Batch>
RLK_DEVICE void token_sequences(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile, int lanes,
                                std::int64_t block, GatheredSums* shared) {
  const PolicySequences& q = Batch::sequences(p);
  sums_of_sequences<Gpu>(q, tile, lanes, block, w.partials[0], shared);
  const int group = Gpu::thread(), groups = kGatherLeaves >> lanes;
  const std::int64_t s = block * groups + group;
  if (group >= groups || s >= q.num_sequences) return;
  const typename Batch::Factors f = Batch::factors_of(p, s, gathered(*shared, group));
  in_global(w.factors)[s] = f;
  Batch::share(f, w.shared, [](std::int64_t* to, std::int64_t count) { Gpu::count_on(in_global(to), count); });
}

// Terms: one for each group of sums.
template <class Gpu, class Batch, int kGroup, class Terms, class... More>
RLK_DEVICE void token_groups(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, std::int64_t slots,
                             int tile, std::int64_t block, WaveResults* shared) {
  // Asked here: beside the denominator clang chooses between addresses of which one may be in LDS.
  const bool has_pass_before = Batch::needs_pass_before(p);
  token_tiles<Gpu, Terms>(p, w.partials[kGroup], slots, tile, block, shared, [&](std::int64_t s) {
    return Batch::template factors<Terms>(p, w.context(), has_pass_before, s);
  });
  if constexpr (sizeof...(More) > 0) {
    Gpu::barrier();  // until all have read what waves left in `shared`
    token_groups<Gpu, Batch, kGroup + 1, More...>(p, w, slots, tile, block, shared);
  }
}
template <class Gpu, class Batch, class... Terms>
RLK_DEVICE void token_terms(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, std::int64_t slots,
                            int tile, std::int64_t block, WaveResults* shared) {
  static_assert(sizeof...(Terms) == Batch::kGroups);
  token_groups<Gpu, Batch, 0, Terms...>(p, w, slots, tile, block, shared);
}

// Totals over `count` of them to `*to`: sums by the tree over their index, a column by one of `kWaves` waves. kMany: more
// than kTotals.
constexpr int kTotals = 128;
template <class Gpu, class Batch, int kWaves, bool kMany>
RLK_DEVICE void sum_totals(const TotalsOf<Batch>* from, int count, TotalsOf<Batch>* to) {
  constexpr int kLanes = Gpu::kLanes, kAhead = kTotals / kLanes;  // loads that are under way together
  constexpr int kCounts = Batch::kSums, kMaxima = Batch::kSums + Batch::kCounts, kColumns = kMaxima + Batch::kMaxima;
  const int wave = Gpu::thread() / kLanes, lane = Gpu::thread() % kLanes;
  RLK_UNROLL_NOT
  for (int column = wave; column < kColumns; column += kWaves) {
    if (column < kCounts) {
      SumTree<kMany ? kSequenceLevels : 1> tree;
      float x[kAhead];
      RLK_UNROLL_NOT
      for (int base = 0; base < count; base += kTotals) {
        RLK_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          const int i = base + k * kLanes + lane;
          x[k] = i < count ? from[i].sum[column] : 0.0f;
        }
        RLK_UNROLL
        for (int distance = 1; distance < kLanes; distance *= 2) {
          RLK_UNROLL
          for (int k = 0; k < kAhead; ++k) x[k] = add_rn(x[k], Gpu::shuffle_xor(x[k], distance));
        }
        RLK_UNROLL
        for (int distance = 1; distance < kAhead; distance *= 2) {
          RLK_UNROLL
          for (int k = 0; k < kAhead; k += 2 * distance) x[k] = add_rn(x[k], x[k + distance]);
        }
        tree.take(x[0]);
      }
      if (lane == 0) to->sum[column] = tree.finish();
    } else if (column < kMaxima) {
      std::int64_t total = 0;
      RLK_UNROLL_NOT
      for (int i = lane; i < count; i += kLanes) total += from[i].count[column - kCounts];
      RLK_UNROLL_NOT
      for (int distance = 1; distance < kLanes; distance *= 2) total += shuffle_xor<Gpu>(total, distance);
      if (lane == 0) to->count[column - kCounts] = total;
    } else {
      float most = from[0].maximum[column - kMaxima];
      RLK_UNROLL_NOT
      for (int i = lane; i < count; i += kLanes) most = maximum_of(most, from[i].maximum[column - kMaxima]);
      RLK_UNROLL_NOT
      for (int distance = 1; distance < kLanes; distance *= 2)
        most = maximum_of(most, Gpu::shuffle_xor(most, distance));
      if (lane == 0) to->maximum[column - kMaxima] = most;
    }
  }
}

template <class Batch>
struct BatchSumsShared {
  union {
    struct {
      GatheredSums of[Batch::kGroups];
      TotalsOf<Batch> sums[kGatherLeaves];
    } leaves;
    TotalsOf<Batch> few[kFewSequences<Batch>];
  };
  TotalsOf<Batch> total;
};
// The sums of at most kFewTiles tiles.
RLK_DEVICE SequenceSums<8> sums_of_few_tiles(const TilePartial<8>* partials, int tiles) {
  static_assert(kFewTiles == 2);
  const TilePartial<8> first = partials[0];
  SequenceSums<8> of;
  RLK_UNROLL
  for (int i = 0; i < 8; ++i) of.sum[i] = first.sum[i];
  RLK_UNROLL
  for (int i = 0; i < kTokenCounts; ++i) of.count[i] = first.count[i];
  RLK_UNROLL
  for (int i = 0; i < kTokenMaxima; ++i) of.maximum[i] = first.maximum[i];
  if (tiles > 1) {
    const TilePartial<8> second = partials[1];
    RLK_UNROLL
    for (int i = 0; i < 8; ++i) of.sum[i] = add_rn(of.sum[i], second.sum[i]);
    RLK_UNROLL
    for (int i = 0; i < kTokenCounts; ++i) of.count[i] += second.count[i];
    RLK_UNROLL
    for (int i = 0; i < kTokenMaxima; ++i) of.maximum[i] = maximum_of(of.maximum[i], second.maximum[i]);
  }
  return of;
}
// Totals of few sequences (are_few), by one block of kTokenThreads, in shared->total.
template <class Gpu, class Batch>
RLK_DEVICE void few_sums(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile,
                         BatchSumsShared<Batch>* shared) {
  static_assert(kFewSequences<Batch> <= kTokenThreads);
  const PolicySequences& q = Batch::sequences(p);
  const auto count = static_cast<int>(q.num_sequences), tiles = static_cast<int>(tiles_of(q.num_tokens, tile));
  const int s = Gpu::thread();
  if (s < count) {
    SequenceSums<8> of[Batch::kGroups];
    RLK_UNROLL
    for (int g = 0; g < Batch::kGroups; ++g) of[g] = sums_of_few_tiles(in_global(w.partials[g]) + s * tiles, tiles);
    shared->few[s] = Batch::of_sequence(p, w.context(), s, of);
  }
  Gpu::barrier();
  sum_totals<Gpu, Batch, kTokenWaves<Gpu>, (kFewSequences<Batch> > kTotals)>(shared->few, count, &shared->total);
  Gpu::barrier();
}
// Totals of the sequences of `block`, in shared->total; where there are more blocks, in blocks[block] too.
template <class Gpu, class Batch>
RLK_DEVICE void batch_sums(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile, int lanes,
                           std::int64_t num_blocks, std::int64_t block, BatchSumsShared<Batch>* shared) {
  const PolicySequences& q = Batch::sequences(p);
  RLK_UNROLL
  for (int g = 0; g < Batch::kGroups; ++g) {
    sums_of_sequences<Gpu>(q, tile, lanes, block, w.partials[g], &shared->leaves.of[g]);
  }
  TotalsOf<Batch>* const sums = shared->leaves.sums;
  const int thread = Gpu::thread(), groups = kGatherLeaves >> lanes;
  if (thread < groups) {
    const std::int64_t s = block * groups + thread;
    if (s < q.num_sequences) {
      SequenceSums<8> of[Batch::kGroups];
      RLK_UNROLL
      for (int g = 0; g < Batch::kGroups; ++g) of[g] = gathered(shared->leaves.of[g], thread);
      sums[thread] = Batch::of_sequence(p, w.context(), s, of);
    } else {
      sums[thread] = Batch::missing();
    }
  }
  Gpu::barrier();
  static_assert(kGatherLeaves <= kTotals);
  sum_totals<Gpu, Batch, kGatherWaves<Gpu>, false>(sums, groups, &shared->total);
  Gpu::barrier();
  if (thread == 0 && num_blocks > 1) in_global(w.blocks)[block] = shared->total;
}
// And over all blocks.
template <class Gpu, class Batch>
RLK_DEVICE void batch_results(const TokenWorkspace<Batch>& w, int num_blocks, TotalsOf<Batch>* total) {
  sum_totals<Gpu, Batch, kGatherWaves<Gpu>, true>(in_global(w.blocks), num_blocks, total);
  Gpu::barrier();
}

// values[i] = f(values[i]), [count], the share of `block` of `blocks`; null: nothing.
template <class Gpu, class F>
RLK_DEVICE void map_values(float* all_values, std::int64_t count, std::int64_t block, std::int64_t blocks, const F& f) {
  if (all_values == nullptr) return;
  float* const values = in_global(all_values);
  const std::int64_t step = blocks * kTokenThreads * kQuad;
  for (std::int64_t i = (block * kTokenThreads + Gpu::thread()) * kQuad; i < count; i += step) {
    if (i + kQuad <= count && is_aligned(values, 16)) {
      Gpu::store_quad(values + i, f(Gpu::load_quad(values + i)));
    } else {
      for (std::int64_t j = i; j < count && j < i + kQuad; ++j) values[j] = f(values[j]);
    }
  }
}

}  // namespace rlk
