// Passes over tokens on a GPU of any vendor, for an operator with a Batch (terms.h). The passes run in this order:
//   statistics   sums of each tile, if tokens need a value of their sequence or numbers of tokens
//   sequences    sums of each sequence, the values that its tokens need, and counts over all sequences
//   tokens       outputs of tokens, and the sums of each tile
//   sums         the tree over tiles and sequences. Each block sums some sequences; if one block suffices for all, it
//                also writes the results
//   results      the tree over the blocks of `sums`, after all these blocks have finished
// If tokens need nothing from their sequence, the passes `statistics` and `sequences` do not run. If one block computes
// all sums, `results` does not run. Without sums only `tokens` runs. map_values is an elementwise pass.
#pragma once

#include <type_traits>

#include "kernels/tokens/lane_passes.h"
#include "kernels/tokens/workspace.h"

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
  const Sequences& q = Batch::sequences(p);
  sums_of_sequences<Gpu>(q, tile, lanes, block, w.partials[0], shared);
  const int group = Gpu::thread(), groups = kGatherLeaves >> lanes;
  const std::int64_t s = block * groups + group;
  if (group >= groups || s >= q.num_sequences) return;
  const typename Batch::Factors f = Batch::factors_of(p, s, gathered(*shared, group));
  in_global(w.factors)[s] = f;
  Batch::share(f, w.shared, [](std::int64_t* to, std::int64_t count) { Gpu::count_on(in_global(to), count); });
}

// The sums of an operator may be split into groups. The template parameters from Terms on are one class of terms for
// each group.
template <class Gpu, class Batch, int kGroup, class Terms, class... More>
RLK_DEVICE void token_groups(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, std::int64_t slots,
                             int tile, std::int64_t block, WaveResults* shared) {
  // needs_pass_before() is called here, away from the code that reads the denominator. If that code read both params,
  // clang would select between their addresses and assume that one address may be in LDS.
  const bool has_pass_before = Batch::needs_pass_before(p);
  token_tiles<Gpu, Terms>(p, w.partials[kGroup], slots, tile, block, shared, [&](std::int64_t s) {
    return Batch::template factors<Terms>(p, w.context(), has_pass_before, s);
  });
  if constexpr (sizeof...(More) > 0) {
    Gpu::barrier();  // every thread has read `shared`, which the next group overwrites
    token_groups<Gpu, Batch, kGroup + 1, More...>(p, w, slots, tile, block, shared);
  }
}
template <class Gpu, class Batch, class... Terms>
RLK_DEVICE void token_terms(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, std::int64_t slots,
                            int tile, std::int64_t block, WaveResults* shared) {
  static_assert(sizeof...(Terms) == Batch::kGroups);
  token_groups<Gpu, Batch, 0, Terms...>(p, w, slots, tile, block, shared);
}

// The values that the waves of a block exchange to compute a total over all threads.
template <class Batch>
struct TotalsShared {
  TotalsOf<Batch> node[kMostGatherWaves], total;
};

// Adds the partial results of a wave's lanes and writes the total to *to. Sums follow the tree over lanes. kFew: every
// count is below 2^25.
template <class Gpu, class Batch, bool kFew>
RLK_DEVICE void total_of_wave(const TotalsOf<Batch>& t, TotalsOf<Batch>* to) {
  const int lane = Gpu::thread() % Gpu::kLanes, mine = sum_index(lane);
  RLK_UNROLL
  for (int first = 0; first < Batch::kSums; first += kLowerSums) {
    float x[kLowerSums];
    RLK_UNROLL
    for (int i = 0; i < kLowerSums; ++i) x[i] = first + i < Batch::kSums ? t.sum[first + i] : 0.0f;
    const float sum = scattered_sum<Gpu>(x);
    if (lane < kLowerSums && first + mine < Batch::kSums) to->sum[first + mine] = sum;
  }
  RLK_UNROLL
  for (int first = 0; first < Batch::kMaxima; first += kLowerSums) {
    float x[kLowerSums];
    RLK_UNROLL
    for (int i = 0; i < kLowerSums; ++i) x[i] = t.maximum[first + i < Batch::kMaxima ? first + i : first];
    const float most = scattered<Gpu>(x, [](float a, float b) { return maximum_of(a, b); });
    if (lane < kLowerSums && first + mine < Batch::kMaxima) to->maximum[first + mine] = most;
  }
  // number of low bits of a count that are summed apart; over a wave, their sum is below 2^32
  constexpr int kLowBits = 25;
  RLK_UNROLL
  for (int i = 0; i < Batch::kCounts; ++i) {
    const auto low = static_cast<std::uint32_t>(t.count[i]) & ((1u << kLowBits) - 1);
    std::int64_t of_wave = Gpu::sum_over_wave(low);
    if constexpr (!kFew) {
      const std::int64_t high = Gpu::sum_over_wave(static_cast<std::uint32_t>(t.count[i] >> kLowBits));
      of_wave += high << kLowBits;
    }
    if (lane == 0) to->count[i] = of_wave;
  }
}
// Writes the total of `count` partial results from(i) to shared->total. Sums follow the tree over i. kMany: `count` may
// exceed the number of threads in a block of kWaves waves. kFew: counts are small (total_of_wave), and a thread reads
// the values of all waves at once.
template <class Gpu, class Batch, int kWaves, bool kMany, bool kFew = false, class From>
RLK_DEVICE void sum_totals(int count, TotalsShared<Batch>* shared, const From& from) {
  constexpr int kLanes = Gpu::kLanes, kThreads = kWaves * kLanes,
                kApart = 64;  // distance that makes different waves compute sums, counts and maxima
  static_assert(Batch::kSums <= kApart && Batch::kCounts <= kApart && Batch::kMaxima <= kApart &&
                3 * kApart <= kThreads);
  const int thread = Gpu::thread(), wave = thread / kLanes, kind = thread / kApart, column = thread % kApart;
  SumTree<kMany ? kSequenceLevels : 1> tree;
  float sum = 0.0f, most = 0.0f;
  std::int64_t counted = 0;
  RLK_UNROLL_NOT
  for (int base = 0; base == 0 || base < count; base += kThreads) {
    const int left = count - base, waves = left >= kThreads ? kWaves
                                           : left <= kLanes ? 1
                                                            : (left + kLanes - 1) / kLanes;
    if (wave < waves)
      total_of_wave<Gpu, Batch, kFew>(thread < left ? from(base + thread) : Batch::missing(), &shared->node[wave]);
    Gpu::barrier();
    if (kind == 0 && column < Batch::kSums) {
      float x[kWaves];
      RLK_UNROLL
      for (int w = 0; w < kWaves; ++w) x[w] = w < waves ? shared->node[w].sum[column] : 0.0f;
      RLK_UNROLL
      for (int distance = 1; distance < kWaves; distance *= 2) {
        RLK_UNROLL
        for (int w = 0; w < kWaves; w += 2 * distance) x[w] = add_rn(x[w], x[w + distance]);
      }
      sum = x[0];
      if constexpr (kMany) tree.take(sum);
    } else if (kind == 1 && column < Batch::kCounts) {
      if constexpr (kFew) {
        RLK_UNROLL
        for (int w = 0; w < kWaves; ++w) counted += w < waves ? shared->node[w].count[column] : 0;
      } else {
        for (int w = 0; w < waves; ++w) counted += shared->node[w].count[column];
      }
    } else if (kind == 2 && column < Batch::kMaxima) {
      if (base == 0) most = shared->node[0].maximum[column];
      if constexpr (kFew) {
        RLK_UNROLL
        for (int w = 0; w < kWaves; ++w) most = w < waves ? maximum_of(most, shared->node[w].maximum[column]) : most;
      } else {
        for (int w = 0; w < waves; ++w) most = maximum_of(most, shared->node[w].maximum[column]);
      }
    }
    if (kMany) Gpu::barrier();
  }
  if constexpr (kMany) sum = tree.finish();
  if (kind == 0 && column < Batch::kSums) shared->total.sum[column] = sum;
  if (kind == 1 && column < Batch::kCounts) shared->total.count[column] = counted;
  if (kind == 2 && column < Batch::kMaxima) shared->total.maximum[column] = most;
  Gpu::barrier();
}
// Each thread stores one result.
template <class Gpu, class Batch>
RLK_DEVICE void store_results(const typename Batch::Params& p, const TokenWorkspace<Batch>& w,
                              const TotalsShared<Batch>& shared) {
  static_assert(Batch::kResults <= kTokenThreads);
  const typename Batch::Params& now = Gpu::first_argument(p);
  if (Gpu::thread() < Batch::kResults) Batch::store(now, w.context(), shared.total, Gpu::thread());
}

template <class Batch>
struct BatchSumsShared {
  GatheredSums of[Batch::kGroups];
  TotalsShared<Batch> totals;
};
// Adds the partial results of at most kFewTiles tiles.
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
template <class Batch>
struct FewShared {
  TotalsShared<Batch> totals;
  TilePartial<8> partials[kFewSequences * kFewTiles];  // partial results of one group of sums at a time
};
// A block of kTokenThreads threads computes the total of at most `most` sequences of few tiles, from sequence `first`
// on. Each thread sums one sequence, and the block loads the partial results together. All threads call share(sums of
// their sequence), which returns the context for the totals.
template <class Gpu, class Batch, class Share>
RLK_DEVICE void few_totals(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile,
                           std::int64_t first, int most, FewShared<Batch>* shared, const Share& share) {
  static_assert(kFewSequences <= kTokenThreads);
  struct alignas(16) Vector {
    std::uint32_t v[4];
  };
  const Sequences& q = Batch::sequences(p);
  const auto tiles = static_cast<int>(tiles_of(q.num_tokens, tile));
  const int left = q.num_sequences - first < most ? static_cast<int>(q.num_sequences - first) : most;
  SequenceSums<8> of[Batch::kGroups];
  RLK_UNROLL
  for (int g = 0; g < Batch::kGroups; ++g) {
    if (g > 0) Gpu::barrier();
    const auto* const from = reinterpret_cast<const Vector*>(in_global(w.partials[g]) + first * tiles);
    auto* const to = reinterpret_cast<Vector*>(shared->partials);
    const int vectors = left * tiles * static_cast<int>(sizeof(TilePartial<8>) / sizeof(Vector));
    if constexpr (Gpu::kFewAtOnce) {
      constexpr int kMost =
          kFewSequences * kFewTiles * static_cast<int>(sizeof(TilePartial<8>) / sizeof(Vector)) / kTokenThreads;
      Vector mine[kMost];
      RLK_UNROLL
      for (int i = 0; i < kMost; ++i) {
        const int at = Gpu::thread() + i * kTokenThreads;
        if (at < vectors) mine[i] = from[at];
      }
      RLK_UNROLL
      for (int i = 0; i < kMost; ++i) {
        const int at = Gpu::thread() + i * kTokenThreads;
        if (at < vectors) to[at] = mine[i];
      }
    } else {
      for (int i = Gpu::thread(); i < vectors; i += kTokenThreads) to[i] = from[i];
    }
    Gpu::barrier();
    if (Gpu::thread() < left) of[g] = sums_of_few_tiles(shared->partials + Gpu::thread() * tiles, tiles);
  }
  const auto context = share(of);
  static_assert((kFewTiles << kMostBlockTile<Gpu>) < 1 << 25);
  sum_totals<Gpu, Batch, kTokenWaves<Gpu>, false, Gpu::kFewAtOnce>(
      left, &shared->totals, [&](int i) { return Batch::of_sequence(p, context, first + i, of); });
}
template <class Gpu, class Batch>
RLK_DEVICE void few_totals(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile,
                           std::int64_t first, int most, FewShared<Batch>* shared) {
  few_totals<Gpu>(p, w, tile, first, most, shared, [&](const auto&) { return w.context(); });
}
// One block computes the total of all sequences (are_few).
template <class Gpu, class Batch>
RLK_DEVICE void few_sums(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile,
                         FewShared<Batch>* shared) {
  few_totals<Gpu>(p, w, tile, 0, kFewSequences, shared);
  store_results<Gpu>(p, w, shared->totals);
}
// Sums the sequences of `block`. If there are several blocks, the sums are written to w.blocks[block]; otherwise the
// block stores the results.
template <class Gpu, class Batch>
RLK_DEVICE void batch_sums(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile, int lanes,
                           std::int64_t num_blocks, std::int64_t block, BatchSumsShared<Batch>* shared) {
  const Sequences& q = Batch::sequences(p);
  RLK_UNROLL
  for (int g = 0; g < Batch::kGroups; ++g) {
    sums_of_sequences<Gpu>(q, tile, lanes, block, w.partials[g], &shared->of[g]);
  }
  const int groups = kGatherLeaves >> lanes;
  const std::int64_t first = block * groups, left = q.num_sequences - first;
  sum_totals<Gpu, Batch, kGatherWaves<Gpu>, false>(left < groups ? static_cast<int>(left) : groups, &shared->totals,
                                                   [&](int i) {
                                                     SequenceSums<8> of[Batch::kGroups];
                                                     RLK_UNROLL
                                                     for (int g = 0; g < Batch::kGroups; ++g) {
                                                       of[g] = gathered(shared->of[g], i);
                                                     }
                                                     return Batch::of_sequence(p, w.context(), first + i, of);
                                                   });
  if (num_blocks == 1) {
    store_results<Gpu>(p, w, shared->totals);
  } else if (Gpu::thread() == 0) {
    in_global(w.blocks)[block] = shared->totals.total;
  }
}
// Sums the totals of all blocks and stores the results.
template <class Gpu, class Batch>
RLK_DEVICE void batch_results(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int num_blocks,
                              TotalsShared<Batch>* shared) {
  const TotalsOf<Batch>* const blocks = in_global(w.blocks);
  sum_totals<Gpu, Batch, kGatherWaves<Gpu>, true>(num_blocks, shared, [&](int i) { return blocks[i]; });
  store_results<Gpu>(p, w, *shared);
}

// Block `block` of `blocks` computes values[i] = f(values[i]) for its share of the `count` elements. A null array is
// skipped.
template <class Gpu, class F>
RLK_DEVICE void map_values(float* all_values, std::int64_t count, std::int64_t block, std::int64_t blocks, const F& f) {
  if (all_values == nullptr) return;
  float* const values = in_global(all_values);
  const std::int64_t step = blocks * kTokenThreads * kVec4;
  for (std::int64_t i = (block * kTokenThreads + Gpu::thread()) * kVec4; i < count; i += step) {
    if (i + kVec4 <= count && is_aligned(values, 16)) {
      Gpu::store_vec4(values + i, f(Gpu::load_vec4(values + i)));
    } else {
      for (std::int64_t j = i; j < count && j < i + kVec4; ++j) values[j] = f(values[j]);
    }
  }
}

}  // namespace rlk
