// Passes over tokens on a GPU, for every vendor, of an operator by its Batch (token_terms.h), each after the one before:
//   statistics   where tokens need something of their sequence, or numbers of tokens: the sums of each tile
//   sequences    and of each sequence, with what follows for its tokens; counts over all of them
//   tokens       the terms of tokens: what they give, and each tile's sums
//   sums         the tree over tiles and sequences, by blocks of sequences; the results where one is enough
//   results      the tree over these blocks
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

// Of kGatherThreads: a column a sum.
template <class Batch>
constexpr int kTotalColumns = Batch::kSums <= 16 ? 16 : 32;
template <class Batch>
constexpr int kTotalRows = kGatherThreads / kTotalColumns<Batch>;

template <class Batch>
struct BatchSumsShared {
  GatheredSums of[Batch::kGroups];
  TotalsOf<Batch> sums[kGatherLeaves];
};
// Of the sequences of `block`; with one block the results, else into blocks[block].
template <class Gpu, class Batch>
RLK_DEVICE void batch_sums(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, int tile, int lanes,
                           std::int64_t num_blocks, std::int64_t block, BatchSumsShared<Batch>* shared) {
  constexpr int kColumns = kTotalColumns<Batch>, kRows = kTotalRows<Batch>;
  static_assert(Batch::kSums <= kColumns && Batch::kCounts <= kColumns && Batch::kMaxima <= kColumns);
  const PolicySequences& q = Batch::sequences(p);
  RLK_UNROLL
  for (int g = 0; g < Batch::kGroups; ++g) {
    sums_of_sequences<Gpu>(q, tile, lanes, block, w.partials[g], &shared->of[g]);
  }
  TotalsOf<Batch>* const sums = shared->sums;
  const int thread = Gpu::thread(), groups = kGatherLeaves >> lanes;
  if (thread < groups) {
    const std::int64_t s = block * groups + thread;
    if (s < q.num_sequences) {
      SequenceSums<8> of[Batch::kGroups];
      RLK_UNROLL
      for (int g = 0; g < Batch::kGroups; ++g) of[g] = gathered(shared->of[g], thread);
      sums[thread] = Batch::of_sequence(p, w.context(), s, of);
    } else {
      sums[thread] = Batch::missing();
    }
  }
  const int row = thread / kColumns, column = thread % kColumns;
  for (int distance = 1; distance < groups; distance *= 2) {
    Gpu::barrier();
    for (int i = 2 * distance * row; i + distance < groups; i += 2 * distance * kRows) {
      if (column < Batch::kSums) sums[i].sum[column] = add_rn(sums[i].sum[column], sums[i + distance].sum[column]);
    }
  }
  Gpu::barrier();
  if (row == 0 && column < Batch::kCounts) {
    for (int i = 1; i < groups; ++i) sums[0].count[column] += sums[i].count[column];
  } else if (row == 2 && column < Batch::kMaxima) {
    for (int i = 1; i < groups; ++i) {
      sums[0].maximum[column] = maximum_of(sums[0].maximum[column], sums[i].maximum[column]);
    }
  }
  Gpu::barrier();
  if (thread != 0) return;
  if (num_blocks == 1) {
    Batch::store(p, w.context(), sums[0]);
  } else {
    in_global(w.blocks)[block] = sums[0];
  }
}

template <class Batch>
struct BatchResultsShared {
  float node[kTotalRows<Batch>][kTotalColumns<Batch>];
  TotalsOf<Batch> total;
};
template <class Gpu, class Batch>
RLK_DEVICE void batch_results(const typename Batch::Params& p, const TokenWorkspace<Batch>& w, std::int64_t num_blocks,
                              BatchResultsShared<Batch>* shared) {
  constexpr int kColumns = kTotalColumns<Batch>, kRows = kTotalRows<Batch>;
  const TotalsOf<Batch>* const blocks = in_global(w.blocks);
  const int row = Gpu::thread() / kColumns, column = Gpu::thread() % kColumns;
  SumTree<kSequenceLevels> tree;
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll 1
#endif
  for (std::int64_t base = 0; base < num_blocks; base += kRows) {
    const bool exists = base + row < num_blocks && column < Batch::kSums;
    shared->node[row][column] = exists ? blocks[base + row].sum[column] : 0.0f;
    for (int distance = 1; distance < kRows; distance *= 2) {
      Gpu::barrier();
      if (row % (2 * distance) == 0) {
        shared->node[row][column] = add_rn(shared->node[row][column], shared->node[row + distance][column]);
      }
    }
    if (row == 0) tree.take(shared->node[0][column]);
    Gpu::barrier();
  }
  if (row == 0 && column < Batch::kSums) shared->total.sum[column] = tree.finish();
  if (row == 2 && column < Batch::kCounts) {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < num_blocks; ++i) count += blocks[i].count[column];
    shared->total.count[column] = count;
  } else if (row == 4 && column < Batch::kMaxima) {
    float most = blocks[0].maximum[column];
    for (std::int64_t i = 1; i < num_blocks; ++i) most = maximum_of(most, blocks[i].maximum[column]);
    shared->total.maximum[column] = most;
  }
  Gpu::barrier();
  if (Gpu::thread() == 0) Batch::store(p, w.context(), shared->total);
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
