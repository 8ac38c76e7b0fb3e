// Losses over tokens on a GPU, for every vendor, in up to five kernels, each after the one before it:
//   statistics   where tokens need sums over their sequence, or their number: those of each tile
//   sequences    and of each sequence, with what follows for its tokens; counts over all of them
//   tokens       the pass over tokens: gradients, and each tile's sums
//   sums         the tree over tiles and sequences, by blocks of sequences; the results where one is enough
//   results      the tree over these blocks
// A loss of single tokens with a denominator takes the last three or two. What an operator gives, by its Params:
// needs_counts, needs_totals, set_weights, policy_factors, total_of, store_results; and its Statistics and Terms, of
// token_terms.h.
#pragma once

#include "rlk/kernels/policy_workspace.h"
#include "rlk/kernels/token_kernels.h"

namespace rlk {

static_assert(kMostGatherLanes == kGatherLanes);

template <class Gpu, class Statistics>
RLK_DEVICE void policy_statistics(const typename Statistics::Params& p, const PolicyWorkspace& w, std::int64_t slots,
                                  int tile, std::int64_t block, WaveResults* shared) {
  if (block == 0 && Gpu::thread() == 0) *in_global(w.totals) = PolicyTotals{0, 0};
  const PolicyFactors none;
  token_tiles<Gpu, Statistics>(p, w.partials, slots, tile, block, shared, [&](std::int64_t) { return none; });
}

template <class Gpu, class Params>
RLK_DEVICE void policy_sequences(const Params& p, const PolicyWorkspace& w, int tile, int lanes, std::int64_t block,
                                 GatheredSums* shared) {
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

template <class Gpu, class Terms>
RLK_DEVICE void policy_tokens(const typename Terms::Params& p, const PolicyWorkspace& w, std::int64_t slots, int tile,
                              std::int64_t block, WaveResults* shared) {
  const bool counted = needs_counts(p);
  token_tiles<Gpu, Terms>(p, w.partials, slots, tile, block, shared, [&](std::int64_t s) {
    PolicyFactors f;
    PolicyTotals totals = {0, 0};
    if (counted) {
      if constexpr (Terms::kOfSequence) {
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

constexpr int kTotalRows = 32, kTotalColumns = 16;  // of kGatherThreads: a column a sum
static_assert(kTotalRows * kTotalColumns == kGatherThreads && kPolicyTotalSums <= kTotalColumns);
static_assert(kPolicyTotalCounts <= kTotalColumns && kTokenMaxima <= kTotalColumns);

struct PolicySumsShared {
  GatheredSums of;
  PolicyTotalSums sums[kGatherLeaves];
};
template <class Gpu, class Params>
RLK_DEVICE void policy_sums(const Params& p, const PolicyWorkspace& w, int tile, int lanes, std::int64_t num_blocks,
                            std::int64_t block, PolicySumsShared* shared) {
  sums_of_sequences<Gpu>(p.sequences, tile, lanes, block, w.partials, &shared->of);
  PolicyTotalSums* const sums = shared->sums;
  const int thread = Gpu::thread(), groups = kGatherLeaves >> lanes;
  PolicyTotals totals = {0, 0};
  if (needs_totals(p)) totals = *in_global(w.totals);
  if (thread < groups) {
    const std::int64_t s = block * groups + thread;
    sums[thread] =
        s < p.sequences.num_sequences ? total_of(p, totals, s, gathered(shared->of, thread)) : PolicyTotalSums{};
  }
  const int row = thread / kTotalColumns, column = thread % kTotalColumns;
  for (int distance = 1; distance < groups; distance *= 2) {
    Gpu::barrier();
    const int i = 2 * distance * row;
    if (i + distance < groups && column < kPolicyTotalSums) {
      sums[i].sum[column] = add_rn(sums[i].sum[column], sums[i + distance].sum[column]);
    }
  }
  Gpu::barrier();
  if (row == 0 && column < kPolicyTotalCounts) {
    for (int i = 1; i < groups; ++i) sums[0].count[column] += sums[i].count[column];
  } else if (row == 2 && column < kTokenMaxima) {
    for (int i = 1; i < groups; ++i) {
      sums[0].maximum[column] = maximum_of(sums[0].maximum[column], sums[i].maximum[column]);
    }
  }
  Gpu::barrier();
  if (thread != 0) return;
  if (num_blocks == 1) {
    store_results(p, totals, sums[0]);
  } else {
    in_global(w.blocks)[block] = sums[0];
  }
}

struct PolicyResultsShared {
  float node[kTotalRows][kTotalColumns];
  PolicyTotalSums total;
};
template <class Gpu, class Params>
RLK_DEVICE void policy_results(const Params& p, const PolicyWorkspace& w, std::int64_t num_blocks,
                               PolicyResultsShared* shared) {
  const PolicyTotalSums* const blocks = in_global(w.blocks);
  const int row = Gpu::thread() / kTotalColumns, column = Gpu::thread() % kTotalColumns;
  SumTree<kSequenceLevels> tree;
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll 1
#endif
  for (std::int64_t base = 0; base < num_blocks; base += kTotalRows) {
    const bool exists = base + row < num_blocks && column < kPolicyTotalSums;
    shared->node[row][column] = exists ? blocks[base + row].sum[column] : 0.0f;
    for (int distance = 1; distance < kTotalRows; distance *= 2) {
      Gpu::barrier();
      if (row % (2 * distance) == 0) {
        shared->node[row][column] = add_rn(shared->node[row][column], shared->node[row + distance][column]);
      }
    }
    if (row == 0) tree.take(shared->node[0][column]);
    Gpu::barrier();
  }
  if (row == 0 && column < kPolicyTotalSums) shared->total.sum[column] = tree.finish();
  if (row == 2 && column < kPolicyTotalCounts) {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < num_blocks; ++i) count += blocks[i].count[column];
    shared->total.count[column] = count;
  } else if (row == 4 && column < kTokenMaxima) {
    float most = 0.0f;
    for (std::int64_t i = 0; i < num_blocks; ++i) most = maximum_of(most, blocks[i].maximum[column]);
    shared->total.maximum[column] = most;
  }
  Gpu::barrier();
  if (Gpu::thread() != 0) return;
  PolicyTotals totals = {0, 0};
  if (needs_totals(p)) totals = *in_global(w.totals);
  store_results(p, totals, shared->total);
}

// Values of `block`, of `blocks`. Nothing is read where the factor is 1.
template <class Gpu>
RLK_DEVICE void scale_values(const ScaleGradientsParams& p, std::int64_t block, std::int64_t blocks) {
  const float factor = *in_global(p.factor);
  if (factor == 1.0f) return;
  const std::int64_t step = blocks * kTokenThreads * kQuad;
  for (std::int64_t i = (block * kTokenThreads + Gpu::thread()) * kQuad; i < p.count; i += step) {
    RLK_UNROLL
    for (int array = 0; array < 2; ++array) {
      float* const values = in_global(array == 0 ? p.first : p.second);
      if (values == nullptr) continue;
      if (i + kQuad <= p.count && is_aligned(values, 16)) {
        const Quad x = Gpu::load_quad(values + i);
        Gpu::store_quad(values + i, canonical(mul_rn(x, broadcast<Quad>(factor))));
      } else {
        for (std::int64_t j = i; j < p.count && j < i + kQuad; ++j) values[j] = canonical(mul_rn(values[j], factor));
      }
    }
  }
}

}  // namespace rlk
