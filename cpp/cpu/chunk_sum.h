// The sum of ops/group_advantage.h and its relatives: chunks of 128, each a perfect binary tree, added ascending from +0.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rlk/math/ieee.h"

namespace rlk::cpu {

constexpr int kTreeChunk = 128;

// Of v[0 .. 127], which it overwrites.
inline float tree_of_chunk(float* v) {
  for (int width = kTreeChunk; width > 1; width /= 2) {
    for (int i = 0; i < width / 2; ++i) v[i] = add_rn(v[2 * i], v[2 * i + 1]);
  }
  return v[0];
}

// Of f(0), ..., f(num - 1).
template <class F>
float chunk_sum(std::int64_t num, const F& f) {
  float total = 0.0f, v[kTreeChunk];
  for (std::int64_t first = 0; first < num; first += kTreeChunk) {
    const int count = static_cast<int>(std::min<std::int64_t>(kTreeChunk, num - first));
    for (int i = 0; i < count; ++i) v[i] = f(first + i);
    std::fill(v + count, v + kTreeChunk, 0.0f);
    total = add_rn(total, tree_of_chunk(v));
  }
  return total;
}

}  // namespace rlk::cpu
