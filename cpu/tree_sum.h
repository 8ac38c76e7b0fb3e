// Sums values in the order of math/tree_sum.h. A function gives the values, one block at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rlk/math/tree_sum.h"

namespace rlk::cpu {

constexpr int kSumBlock = 2048;

// Writes the level above v[0 .. count - 1] to `to`; the compiler vectorises it.
inline void add_pairs(const float* __restrict v, int count, float* __restrict to) {
  for (int i = 0; i < count / 2; ++i) to[i] = add_rn(v[2 * i], v[2 * i + 1]);
  if (count % 2 != 0) to[count / 2] = v[count - 1];
}
// The node over v[0 .. count - 1], 1 <= count <= kSumBlock; v is overwritten.
inline float tree_of_block(float* v, int count) {
  alignas(64) float other[kSumBlock / 2];
  float *from = v, *to = other;
  for (; count > 1; count = (count + 1) / 2) {
    add_pairs(from, count, to);
    std::swap(from, to);
  }
  return from[0];
}

// fill(first, count, to) writes `count` values from index `first` on.
template <class F>
float tree_sum_of_blocks(std::int64_t num, const F& fill) {
  SumTree<kSequenceLevels> tree;
  alignas(64) float v[kSumBlock];
  for (std::int64_t first = 0; first < num; first += kSumBlock) {
    const int count = static_cast<int>(std::min<std::int64_t>(kSumBlock, num - first));
    fill(first, count, v);
    tree.take(tree_of_block(v, count));
  }
  return finished_sum(tree.finish());
}
// The sum of f(0), ..., f(num - 1).
template <class F>
float tree_sum(std::int64_t num, const F& f) {
  return tree_sum_of_blocks(num, [&](std::int64_t first, int count, float* to) {
    for (int i = 0; i < count; ++i) to[i] = f(first + i);
  });
}

}  // namespace rlk::cpu
