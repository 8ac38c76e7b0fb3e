// Sorts indices by their keys on a GPU. Indices with equal keys stay in ascending order. The sort uses two arrays of
// indices and no other global memory. First each block sorts one run of indices. Then kMergeWays runs at a time are
// merged: a binary search in the other runs finds the place of each index.
#pragma once

#include <cstdint>

#include "rlk/tokens.h"

namespace rlk {

constexpr int kOrderThreads = 512;
constexpr int kOrderRun = 2 * kOrderThreads;
constexpr int kMergeWays = 4;

struct OrderShared {
  std::int64_t keys[kOrderRun];
  std::int32_t indices[kOrderRun];
};

inline std::int64_t order_runs(std::int64_t num) { return (num + kOrderRun - 1) / kOrderRun; }

// Whether the blocks write their sorted runs to the first of the two arrays. Merge passes alternate between the arrays,
// and the last pass must write the second one.
inline bool order_begins_first(std::int64_t num) {
  bool first = false;
  for (std::int64_t run = kOrderRun; run < num; run *= kMergeWays) first = !first;
  return first;
}
// Calls merge(run, from_first) for each pass: `run` is the length of the sorted runs, and `from_first` tells whether
// the first array holds them. The pass writes the other array.
template <class F>
void for_each_merge(std::int64_t num, const F& merge) {
  bool from_first = order_begins_first(num);
  for (std::int64_t run = kOrderRun; run < num; run *= kMergeWays, from_first = !from_first) {
    merge(static_cast<std::int32_t>(run), from_first);
  }
}

// A block sorts a run of `num` indices by a bitonic network. key(index) gives a key. barrier() synchronises the block,
// and warp_barrier() synchronises 32 threads.
template <class Memory, class Key, class Barrier, class WarpBarrier>
RLK_HD void order_run(const Key& key, std::int32_t num, std::int32_t run, int thread, OrderShared& shared,
                      std::int32_t* order, const Barrier& barrier, const WarpBarrier& warp_barrier) {
  const std::int32_t first = run * kOrderRun, left = num - first < kOrderRun ? num - first : kOrderRun;
  RLK_UNROLL
  for (int k = thread; k < kOrderRun; k += kOrderThreads) {
    const bool exists = k < left;
    shared.keys[k] = exists ? key(first + k) : std::int64_t{0x7fffffffffffffff};
    // this index comes after every other index, even if their keys are equal
    shared.indices[k] = exists ? first + k : 0x7fffffff;
  }
  barrier();
  RLK_UNROLL_NOT
  for (int size = 2; size < 2 * left; size *= 2) {
    RLK_UNROLL_NOT
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const int a = 2 * thread - (thread & (stride - 1)), b = a + stride;
      const std::int64_t of_a = shared.keys[a], of_b = shared.keys[b];
      const std::int32_t i = shared.indices[a], j = shared.indices[b];
      const bool after = of_a > of_b || (of_a == of_b && i > j);
      if (after == ((a & size) == 0)) {
        shared.keys[a] = of_b;
        shared.keys[b] = of_a;
        shared.indices[a] = j;
        shared.indices[b] = i;
      }
      // If all pairs lie within 64 neighbouring places, the same warp handles them, so a warp barrier is enough.
      stride > 32 || (stride == 1 && size >= 64) ? barrier() : warp_barrier();
    }
  }
  barrier();
  for (int k = thread; k < left; k += kOrderThreads) Memory::global(order)[first + k] = shared.indices[k];
}

// Moves the index at place `at` of sorted runs to its place in the merged run of kMergeWays runs.
template <class Memory, class Key>
RLK_HD void merge_index(const Key& key, std::int32_t num, std::int32_t run, std::int32_t at, const std::int32_t* sorted,
                        std::int32_t* order) {
  const auto* from = Memory::global(sorted);
  const std::int32_t index = from[at], own = at / run, group = own / kMergeWays * kMergeWays;
  const std::int64_t mine = key(index);
  std::int32_t before[kMergeWays] = {};
  RLK_UNROLL_NOT
  for (std::int32_t step = run; step > 0; step /= 2) {
    bool exists[kMergeWays];
    std::int64_t other[kMergeWays];
    RLK_UNROLL
    // this loop has no branches, so that all of its loads are in flight together
    for (int w = 0; w < kMergeWays; ++w) {
      const std::int64_t probe = std::int64_t{group + w} * run + before[w] + step - 1;
      exists[w] = group + w != own && before[w] + step <= run && probe < num;
      other[w] = key(from[exists[w] ? probe : at]);
    }
    RLK_UNROLL
    for (int w = 0; w < kMergeWays; ++w) {
      const bool earlier = other[w] < mine || (other[w] == mine && group + w < own);
      before[w] += exists[w] && earlier ? step : 0;
    }
  }
  std::int32_t place = group * run + at - own * run;
  RLK_UNROLL
  for (int w = 0; w < kMergeWays; ++w) place += before[w];
  Memory::global(order)[place] = index;
}

}  // namespace rlk
