// Reduces several vectors at once by transposing their lanes: the lanes of each leaf (128 columns of a row) become one
// value per leaf.
#pragma once

#include "simd.h"

namespace rlk::cpu::RLK_CPU_ISA {

// Number of vectors that hold the chains of a block's leaves. Vector k holds the eight chains of leaf k in lanes 0..7. If
// it has sixteen lanes, it also holds the chains of leaf k + 8 in lanes 8..15.
constexpr int kPairs = 8;

// Selects lanes of a, then of b, by index.
template <int... kLane, class V>
RLK_HD V shuffle(V a, V b) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kLane...);
#else  // for g++ 10, which compiles the wheels
  return __builtin_shuffle(a, b, Vector<std::int32_t>{kLane...});
#endif
}

// Steps of a transposition within each 128 bits. even_lanes() takes the even lanes of a and b, odd_lanes() the odd
// lanes.
template <class V>
RLK_HD V even_lanes(V a, V b) {
#if defined(__AVX512F__)
  return shuffle<0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30>(a, b);
#else
  return shuffle<0, 2, 8, 10, 4, 6, 12, 14>(a, b);
#endif
}
template <class V>
RLK_HD V odd_lanes(V a, V b) {
#if defined(__AVX512F__)
  return shuffle<1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31>(a, b);
#else
  return shuffle<1, 3, 9, 11, 5, 7, 13, 15>(a, b);
#endif
}
// The 128-bit quarters 0 and 2 of a and of b; odd_quarters() gives quarters 1 and 3. For leaves k and k + 8, even
// quarters hold the lower four chains and odd quarters the upper four.
template <class V>
RLK_HD V even_quarters(V a, V b) {
#if defined(__AVX512F__)
  return shuffle<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(a, b);
#else
  return shuffle<0, 1, 2, 3, 8, 9, 10, 11>(a, b);
#endif
}
template <class V>
RLK_HD V odd_quarters(V a, V b) {
#if defined(__AVX512F__)
  return shuffle<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>(a, b);
#else
  return shuffle<4, 5, 6, 7, 12, 13, 14, 15>(a, b);
#endif
}

// Lane l of the result is ((0+1)+(2+3))+((4+5)+(6+7)) over the eight lanes of leaf l.
template <class V, class Op>
RLK_HD V fold_chains(const V* pairs, Op op) {
  V half[2];
  for (int i = 0; i < 2; ++i) {
    const V* v = pairs + 4 * i;
    const V low = op(even_lanes(v[0], v[1]), odd_lanes(v[0], v[1]));
    const V high = op(even_lanes(v[2], v[3]), odd_lanes(v[2], v[3]));
    half[i] = op(even_lanes(low, high), odd_lanes(low, high));
  }
  return op(even_quarters(half[0], half[1]), odd_quarters(half[0], half[1]));
}

// Lane l of the result is `op` over all lanes of leaves[l], in some order.
template <class V, class Op>
RLK_HD V fold_leaves(const V* leaves, Op op) {
#if defined(__AVX512F__)
  V pairs[kPairs];
  for (int k = 0; k < kPairs; ++k) {
    const V a = leaves[k], b = leaves[k + kPairs];
    pairs[k] = op(shuffle<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b),
                  shuffle<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b));
  }
  return fold_chains(pairs, op);
#else
  return fold_chains(leaves, op);
#endif
}

}  // namespace rlk::cpu::RLK_CPU_ISA
