// Statistics of the leaves in a wgmma accumulator: 64 rows by 256 columns hold two leaves a row. Thread t of a warpgroup
// has, of rows t / 4 % 8 and 8 more of its warp's sixteen, columns 8 j + 2 (t % 4) + {0, 1}: two whole chains of every leaf.
#pragma once

#include "../common/element.cuh"
#include "rlk/math/softmax_stats.h"

namespace rlk::cuda {

constexpr unsigned kQuadLanes = 0xffffffffu;
__device__ __forceinline__ float quad_xor(float x, int distance) { return __shfl_xor_sync(kQuadLanes, x, distance); }

template <Exp kExp>
__device__ __forceinline__ float leaf_exponential(float z, float c, float addend) {
  return kExp == Exp::kHardware ? ex2_approx(fma_rn(z, c, addend)) : stat_exp_portable(z, c, addend);
}
template <Exp kExp>
__device__ __forceinline__ float leaf_addend(float m) {
  return kExp == Exp::kHardware ? -m : sub_rn(kStatsShift, m);
}

// Two chains of a leaf of one row.
template <bool kMoments>
struct TwoChains {
  float S[2] = {0.0f, 0.0f}, E[2] = {0.0f, 0.0f}, Q[2] = {0.0f, 0.0f};
  __device__ __forceinline__ void add(int i, float z, float e) {
    S[i] = add_rn(S[i], e);
    if constexpr (kMoments) {
      E[i] = fma_rn(e, z, E[i]);
      Q[i] = fma_rn(e, e, Q[i]);
    }
  }
  static __device__ __forceinline__ float total(const float (&chain)[2]) {
    float sum = add_rn(chain[0], chain[1]);
    sum = add_rn(sum, quad_xor(sum, 1));
    return add_rn(sum, quad_xor(sum, 2));
  }
  __device__ __forceinline__ SoftmaxStats stats(float m) const {
    return {m, total(S), kMoments ? total(E) : 0.0f, kMoments ? total(Q) : 0.0f};
  }
};

constexpr int kLeafFragments = kLeafColumns / 8;  // groups of eight columns

// Leaf `leaf` of row h of a thread's two; all lanes of its quad get the same. logit(d, j) is z of an accumulator in the
// tile's columns 8 j and on; it is -Inf where there is no column.
template <Exp kExp, bool kMoments, int kFragment, class Logit>
__device__ __forceinline__ SoftmaxStats leaf_statistics(const float (&d)[kFragment], int leaf, int h, float c,
                                                        const Logit& logit) {
  float values[2 * kLeafFragments];
#pragma unroll
  for (int j = 0; j < kLeafFragments; ++j) {
    const int at = kLeafFragments * leaf + j;
#pragma unroll
    for (int i = 0; i < 2; ++i) values[2 * j + i] = logit(d[4 * at + 2 * h + i], 8 * at + i);
  }
  const auto z = [&](int j, int i) { return values[2 * j + i]; };
  float largest = -infinity(), smallest = infinity();
#pragma unroll
  for (int j = 0; j < kLeafFragments; ++j) {
    largest = max_nan(largest, max_nan(z(j, 0), z(j, 1)));
    smallest = fminf(smallest, fminf(z(j, 0), z(j, 1)));
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    largest = max_nan(largest, quad_xor(largest, distance));
    smallest = fminf(smallest, quad_xor(smallest, distance));
  }
  const float m = add_rn(ceil_of(mul_rn(c, largest)), 0.0f);
  // Well inside the bounds of leaf_reference, so that nothing is clamped, missing or failed.
  const bool simple = abs_of(m) < 0.5f * kStatsRange && fma_rn(smallest, c, -m) >= 1.0f - kStatsFloor;
  TwoChains<kMoments> chains;
  if (__all_sync(kQuadLanes, simple)) {
    const float addend = leaf_addend<kExp>(m);
#pragma unroll
    for (int j = 0; j < kLeafFragments; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) chains.add(i, z(j, i), leaf_exponential<kExp>(z(j, i), c, addend));
    }
    return chains.stats(m);
  }
  SoftmaxStats whole;
  const LeafReference reference = leaf_reference(c, largest, &whole);
  const float addend = leaf_addend<kExp>(reference.m);
#pragma unroll
  for (int j = 0; j < kLeafFragments; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = z(j, i), clamped = x > reference.q ? x : reference.q;
      const bool exists = reference.usable && x != -infinity();
      const float e = leaf_exponential<kExp>(clamped, c, addend);
      chains.add(i, exists ? clamped : 0.0f, exists ? e : 0.0f);
    }
  }
  const SoftmaxStats sums = chains.stats(reference.m);  // shuffles: by all lanes
  return reference.usable ? sums : whole;
}

}  // namespace rlk::cuda
