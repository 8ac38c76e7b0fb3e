// Statistics of the leaves in a wgmma accumulator: 64 rows by 256 columns hold two leaves per row. Thread t of a
// warpgroup holds two of its warp's sixteen rows, r and r + 8 with r = t / 4 % 8. In these rows, thread t holds columns
// 8 j + 2 (t % 4) + {0, 1}: two whole chains (every eighth column) of every leaf. The tensor cores may idle during the
// statistics. All work that can be deferred therefore runs during the next tile's products.
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

constexpr int kLeafFragments = kLeafColumns / 8;  // groups of eight columns
constexpr int kTileLeaves = 2, kTileRows = 2;     // leaves per tile; a thread's rows of a tile

// A lane's sums over its two chains of one row's leaf. The tree over the four lanes of a quad gives the leaf's sums
// (rule 5 of docs/numerics.md).
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
  __device__ __forceinline__ SoftmaxStats sums(float m) const {
    return {m, add_rn(S[0], S[1]), kMoments ? add_rn(E[0], E[1]) : 0.0f, kMoments ? add_rn(Q[0], Q[1]) : 0.0f};
  }
};

// A lane's parts of the statistics of its rows' leaves in a tile, [leaf][row].
struct TileShares {
  SoftmaxStats of[kTileLeaves][kTileRows];
};

// For each of the two rows, combines the nodes a and b, and stores their parent in a. All lanes call this function.
template <bool kMoments>
__device__ __forceinline__ void combine_rows(SoftmaxStats (&a)[kTileRows], const SoftmaxStats (&b)[kTileRows]) {
  bool usable = true;
#pragma unroll
  for (int h = 0; h < kTileRows; ++h) usable = usable && abs_of(a[h].m) < infinity() && abs_of(b[h].m) < infinity();
  if (__all_sync(kQuadLanes, usable)) {  // combine() without its branches, which take most of its time
#pragma unroll
    for (int h = 0; h < kTileRows; ++h) {
      const float m = fmaxf(a[h].m, b[h].m), least = -600.0f;
      const int da = static_cast<int>(fmaxf(sub_rn(a[h].m, m), least));
      const int db = static_cast<int>(fmaxf(sub_rn(b[h].m, m), least));
      a[h].m = m;
      a[h].S = add_rn(scale_down(a[h].S, da), scale_down(b[h].S, db));
      if constexpr (kMoments) {
        a[h].E = add_rn(scale_down(a[h].E, da), scale_down(b[h].E, db));
        a[h].Q = add_rn(scale_down(a[h].Q, 2 * da), scale_down(b[h].Q, 2 * db));
      }
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < kTileRows; ++h) a[h] = combine(a[h], b[h]);
}

// Computes a lane's parts of the statistics of kLeaves leaves of two rows. z(leaf, j, h) returns the lane's two columns
// of row h among the eight columns from 8 j on, or -Inf after the end. Maxima and chains of both rows are interleaved,
// so one row's instructions run while the other row waits for its shuffles.
template <Exp kExp, bool kMoments, int kLeaves, class Logits>
__device__ __forceinline__ void leaf_shares(const Logits& z, const float (&c)[kTileRows],
                                            SoftmaxStats (&shares)[kLeaves][kTileRows]) {
  // The lower limit of z does not change S, the sum of exponentials: the largest exponential of the leaf is at least
  // 1/2, so adding terms of 2^-120 or less does not change the rounded sum. The limit matters only for sums of z, for
  // sums of squares, and for the exponents of the portable exponential.
  constexpr bool kClamps = kMoments || kExp == Exp::kPortable;
  float largest[kLeaves][kTileRows], smallest[kLeaves][kTileRows];
#pragma unroll
  for (int leaf = 0; leaf < kLeaves; ++leaf) {
#pragma unroll
    for (int h = 0; h < kTileRows; ++h) {
      largest[leaf][h] = -infinity(), smallest[leaf][h] = infinity();
#pragma unroll
      for (int j = 0; j < kLeafFragments; ++j) {
        const float2 x = z(leaf, j, h);
        largest[leaf][h] = max_nan(largest[leaf][h], max_nan(x.x, x.y));
        if constexpr (kClamps) smallest[leaf][h] = fminf(smallest[leaf][h], fminf(x.x, x.y));
      }
    }
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int leaf = 0; leaf < kLeaves; ++leaf) {
#pragma unroll
      for (int h = 0; h < kTileRows; ++h) {
        largest[leaf][h] = max_nan(largest[leaf][h], quad_xor(largest[leaf][h], distance));
        if constexpr (kClamps) smallest[leaf][h] = fminf(smallest[leaf][h], quad_xor(smallest[leaf][h], distance));
      }
    }
  }
  // In the simple case, no column is clamped or missing, and no row fails. Its bounds are stricter than those of
  // `leaf_reference`.
  float m[kLeaves][kTileRows];
  bool simple = true;
#pragma unroll
  for (int leaf = 0; leaf < kLeaves; ++leaf) {
#pragma unroll
    for (int h = 0; h < kTileRows; ++h) {
      m[leaf][h] = add_rn(ceil_of(mul_rn(c[h], largest[leaf][h])), 0.0f);
      simple = simple && abs_of(m[leaf][h]) < 0.5f * kStatsRange;
      if constexpr (kClamps) {
        simple = simple && fma_rn(smallest[leaf][h], c[h], -m[leaf][h]) >= 1.0f - kStatsFloor;
      } else {
        simple = simple && c[h] > 0.0f;
      }
    }
  }
  if (__all_sync(kQuadLanes, simple)) {
    TwoChains<kMoments> chains[kLeaves][kTileRows];
#pragma unroll
    for (int j = 0; j < kLeafFragments; ++j) {
#pragma unroll
      for (int leaf = 0; leaf < kLeaves; ++leaf) {
#pragma unroll
        for (int h = 0; h < kTileRows; ++h) {
          const float addend = leaf_addend<kExp>(m[leaf][h]);
          const float2 x = z(leaf, j, h);
          chains[leaf][h].add(0, x.x, leaf_exponential<kExp>(x.x, c[h], addend));
          chains[leaf][h].add(1, x.y, leaf_exponential<kExp>(x.y, c[h], addend));
        }
      }
    }
#pragma unroll
    for (int leaf = 0; leaf < kLeaves; ++leaf) {
#pragma unroll
      for (int h = 0; h < kTileRows; ++h) shares[leaf][h] = chains[leaf][h].sums(m[leaf][h]);
    }
    return;
  }
#pragma unroll
  for (int leaf = 0; leaf < kLeaves; ++leaf) {
#pragma unroll
    for (int h = 0; h < kTileRows; ++h) {
      SoftmaxStats whole;
      const LeafReference reference = leaf_reference(c[h], largest[leaf][h], &whole);
      const float addend = leaf_addend<kExp>(reference.m);
      TwoChains<kMoments> chains;
      const auto add = [&](int i, float x) {
        const float clamped = x > reference.q ? x : reference.q;
        const bool exists = reference.usable && x != -infinity();
        const float e = leaf_exponential<kExp>(clamped, c[h], addend);
        chains.add(i, exists ? clamped : 0.0f, exists ? e : 0.0f);
      };
#pragma unroll
      for (int j = 0; j < kLeafFragments; ++j) {
        const float2 x = z(leaf, j, h);
        add(0, x.x), add(1, x.y);
      }
      // If a leaf's statistics need no sums, one lane of the quad holds them, and the other lanes hold the identity.
      if (!reference.usable && threadIdx.x % 4 != 0) whole.S = whole.E = whole.Q = 0.0f;
      shares[leaf][h] = reference.usable ? chains.sums(reference.m) : whole;
    }
  }
}

// Adds the parts of a quad's four lanes. All four lanes then hold the leaves' nodes.
template <bool kMoments, int kLeaves>
__device__ __forceinline__ void add_shares(SoftmaxStats (&shares)[kLeaves][kTileRows]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int leaf = 0; leaf < kLeaves; ++leaf) {
#pragma unroll
      for (int h = 0; h < kTileRows; ++h) {
        SoftmaxStats& share = shares[leaf][h];
        share.S = add_rn(share.S, quad_xor(share.S, distance));
        if constexpr (kMoments) {
          share.E = add_rn(share.E, quad_xor(share.E, distance));
          share.Q = add_rn(share.Q, quad_xor(share.Q, distance));
        }
      }
    }
  }
}

// A thread's two accumulators of row h in the eight columns from 8 j on, of a leaf that begins at fragment `first`.
template <int kFragment>
__device__ __forceinline__ float2 columns_of(const float (&d)[kFragment], int first, int j, int h) {
  return make_float2(d[4 * (first + j) + 2 * h], d[4 * (first + j) + 2 * h + 1]);
}

// Each row's node over a tile's two leaves, from the parts of a quad's lanes.
template <bool kMoments>
__device__ __forceinline__ void tile_nodes(TileShares* shares, SoftmaxStats (&node)[kTileRows]) {
  add_shares<kMoments>(shares->of);
#pragma unroll
  for (int h = 0; h < kTileRows; ++h) node[h] = shares->of[0][h];
  combine_rows<kMoments>(node, shares->of[1]);
}

}  // namespace rlk::cuda
