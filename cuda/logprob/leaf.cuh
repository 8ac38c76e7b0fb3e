// The softmax statistics of a leaf (128 columns of a row), which one lane computes from shared memory. Rule 4 of
// docs/numerics.md defines them: m is the reference, S the sum of exponentials, E and Q the moments.
#pragma once

#include "../common/element.cuh"
#include "rlk/math/softmax_stats.h"
#include "rlk/ops/logprob.h"

namespace rlk::cuda {

// A leaf in shared memory. Each line of 128 bytes in global memory is copied to one line of shared memory, since a copy
// request costs twice as much if it writes to two lines. The 16-byte chunks of a line are permuted, so that lanes that
// read the same chunk of their own leaves access different banks.
template <class T>
struct Leaf {
  static constexpr int kBytes = kLeafColumns * static_cast<int>(sizeof(typename T::Storage));
  std::uint32_t address;  // address in shared memory of the leaf's first chunk, before the permutation

  // Returns the permuted address of the chunk at `address`. The permutation differs from leaf to leaf.
  static __device__ __forceinline__ std::uint32_t place(std::uint32_t address) {
    return address ^ (address / (kBytes / 16) & 7 * 16);
  }
  __device__ __forceinline__ uint4& chunk(int i) const {
    return *static_cast<uint4*>(__cvta_shared_to_generic(place(address + i * 16)));
  }
  __device__ __forceinline__ typename T::Storage* element(int column) const {
    constexpr int kColumns = Vector<T>::kColumns;
    return reinterpret_cast<typename T::Storage*>(&chunk(column / kColumns)) + column % kColumns;
  }
  __device__ __forceinline__ Vec8<T> vec8(int vec8) const {
    Vec8<T> o;
#pragma unroll
    for (int i = 0; i < Vec8<T>::kVectors; ++i) o.v[i].v = chunk(vec8 * Vec8<T>::kVectors + i);
    return o;
  }
};

// Returns 16 bytes of the 32 bytes `low`, `high`. They begin at word `words` plus `bits` bits (0 or 16).
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, int words, int bits) {
  const std::uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  std::uint32_t pair[6], word[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) pair[i] = words & 2 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = words & 1 ? pair[i + 1] : pair[i];
  return make_uint4(__funnelshift_r(word[0], word[1], bits), __funnelshift_r(word[1], word[2], bits),
                    __funnelshift_r(word[2], word[3], bits), __funnelshift_r(word[3], word[4], bits));
}

// Moves the n columns of a leaf, which begin `shift` bytes into its first chunk of 16 bytes, to the start of this
// chunk. All lanes of a warp call this function together, since a leaf may end in the chunk in which the next lane's
// leaf begins.
template <class T>
__device__ __forceinline__ void align_leaf(const Leaf<T>& leaf, int n, int shift) {
  const int words = shift / 4, bits = shift % 4 * 8;
  const int chunks = (n + Vector<T>::kColumns - 1) / Vector<T>::kColumns;
  uint4 low{}, end{};
  if (n > 0) {  // an empty leaf may lie outside the copy
    low = leaf.chunk(0);
    end = leaf.chunk(chunks);
  }
  __syncwarp();
#pragma unroll 4
  for (int i = 0; i < chunks; ++i) {
    const uint4 high = i + 1 < chunks ? leaf.chunk(i + 1) : end;
    leaf.chunk(i) = shifted(low, high, words, bits);
    low = high;
  }
}

// The eight partial sums ("chains") of a leaf. Column k of the leaf belongs to chain k % 8.
template <Exp kExp, bool kMoments>
struct Chains {
  float S[kNumChains], E[kNumChains], Q[kNumChains];

  __device__ __forceinline__ Chains() {
#pragma unroll
    for (int r = 0; r < kNumChains; ++r) S[r] = E[r] = Q[r] = 0.0f;
  }
  // Returns -m, or kStatsShift - m for the portable exponential.
  static __device__ __forceinline__ float addend(float m) {
    return kExp == Exp::kHardware ? -m : sub_rn(kStatsShift, m);
  }
  static __device__ __forceinline__ float exponential(float z, float c, float addend) {
    return kExp == Exp::kHardware ? ex2_approx(fma_rn(z, c, addend)) : stat_exp_portable(z, c, addend);
  }
  __device__ __forceinline__ void add(int r, float z, float e) {
    S[r] = add_rn(S[r], e);
    if constexpr (kMoments) {
      E[r] = fma_rn(e, z, E[r]);
      Q[r] = fma_rn(e, e, Q[r]);
    }
  }
  __device__ __forceinline__ void add_vec8(const float (&z)[kVec8], float c, float addend) {
#pragma unroll
    for (int r = 0; r < kNumChains; ++r) add(r, z[r], exponential(z[r], c, addend));
  }
  // Adds the first n columns of a vec8 (eight neighbouring columns). The other columns add +0, which changes no sum.
  __device__ __forceinline__ void add_columns(const float (&z)[kVec8], int n, float c, float addend) {
#pragma unroll
    for (int r = 0; r < kNumChains; ++r) {
      const float present = r < n ? z[r] : 0.0f;
      const float e = exponential(present, c, addend);
      add(r, present, r < n ? e : 0.0f);
    }
  }
  __device__ __forceinline__ SoftmaxStats total(float m) const {
    return {m, combine_chains(S), kMoments ? combine_chains(E) : 0.0f, kMoments ? combine_chains(Q) : 0.0f};
  }
};

// The loops over a leaf process blocks of kBlockVec8s vec8s. The remaining vec8s are processed one at a time, column by
// column.
constexpr int kBlockVec8s = 4;
constexpr int kBlockColumns = kBlockVec8s * kVec8;

// Returns the largest and the smallest of the first n columns of a leaf, n >= kBlockColumns.
template <class T>
__device__ __forceinline__ Range leaf_range(const Leaf<T>& leaf, int n) {
  RangeOf<T> range_of(leaf.vec8(0).v[0]);
  const int whole = n / kBlockColumns * kBlockVec8s;
#pragma unroll 1
  for (int vec8 = 0; vec8 < whole; vec8 += kBlockVec8s) {
#pragma unroll
    for (int o = 0; o < kBlockVec8s; ++o) {
      const Vec8<T> x = leaf.vec8(vec8 + o);
#pragma unroll
      for (int i = 0; i < Vec8<T>::kVectors; ++i) range_of.add(x.v[i]);
    }
  }
  Range range = range_of.range();
#pragma unroll 1
  for (int vec8 = whole; vec8 * kVec8 < n; ++vec8) {
    const int rest = n - vec8 * kVec8;
    float z[kVec8];
    leaf.vec8(vec8).to_float(z);
#pragma unroll
    for (int r = 0; r < kVec8; ++r) {
      if (r >= rest) continue;
      range.largest = max_nan(range.largest, z[r]);
      range.smallest = fminf(range.smallest, z[r]);
    }
  }
  return range;
}

// Returns the statistics of the first n columns. No column may be -Inf or so small that it would be clamped.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats leaf_sums(const Leaf<T>& leaf, int n, float c, float m) {
  Chains<kExp, kMoments> chains;
  const float addend = chains.addend(m);
  const int whole = n / kBlockColumns * kBlockVec8s;
  float z[kVec8];
#pragma unroll 1
  for (int vec8 = 0; vec8 < whole; vec8 += kBlockVec8s) {
#pragma unroll
    for (int o = 0; o < kBlockVec8s; ++o) {
      leaf.vec8(vec8 + o).to_float(z);
      chains.add_vec8(z, c, addend);
    }
  }
#pragma unroll 1
  for (int vec8 = whole; vec8 * kVec8 < n; ++vec8) {
    leaf.vec8(vec8).to_float(z);
    chains.add_columns(z, n - vec8 * kVec8, c, addend);
  }
  return chains.total(m);
}

// Returns the statistics of any leaf of n columns: logits may be scaled, softcapped, clamped, or -Inf.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats general_leaf(const Leaf<T>& leaf, int n, float c, float logit_scale,
                                                     float softcap) {
  const float inverse = softcap > 0.0f ? div_rn(1.0f, softcap) : 0.0f;
  float largest = -infinity();
#pragma unroll 1
  for (int o = 0; o * kVec8 < n; ++o) {
    float z[kVec8];
    leaf.vec8(o).to_float(z);
#pragma unroll
    for (int r = 0; r < kVec8; ++r) {
      if (o * kVec8 + r < n) largest = max_nan(largest, scaled_logit(z[r], logit_scale, softcap, inverse));
    }
  }
  SoftmaxStats stats;
  const LeafReference reference = leaf_reference(c, largest, &stats);
  if (!reference.usable) return stats;
  Chains<kExp, kMoments> chains;
  const float addend = chains.addend(reference.m);
#pragma unroll 1
  for (int o = 0; o * kVec8 < n; ++o) {
    float z[kVec8];
    leaf.vec8(o).to_float(z);
#pragma unroll
    for (int r = 0; r < kVec8; ++r) {
      const float s = scaled_logit(z[r], logit_scale, softcap, inverse);
      if (o * kVec8 + r >= n || s == -infinity()) continue;
      const float clamped = s > reference.q ? s : reference.q;
      chains.add(r, clamped, chains.exponential(clamped, c, addend));
    }
  }
  return chains.total(reference.m);
}

// Returns the statistics of a lane's leaf of n columns. In the common case the logits are neither scaled nor
// softcapped, and no column is -Inf or clamped. The short loop of leaf_sums() then suffices.
template <class T, Exp kExp, bool kMoments>
__device__ __forceinline__ SoftmaxStats leaf_stats(const Leaf<T>& leaf, int n, float c, float logit_scale,
                                                   float softcap) {
  if (n <= 0) return identity_stats();
  if (n >= kBlockColumns && logit_scale == 1.0f && softcap == 0.0f) {
    const Range range = leaf_range<T>(leaf, n);
    const float m = add_rn(ceil_of(mul_rn(c, range.largest)), 0.0f);
    // The bounds of this test are narrower than those of leaf_reference(). So no column is clamped or -Inf, the row
    // does not fail, and q (the smallest logit that is not clamped) need not be computed.
    if (abs_of(m) < 0.5f * kStatsRange && fma_rn(range.smallest, c, -m) >= 1.0f - kStatsFloor) {
      return leaf_sums<T, kExp, kMoments>(leaf, n, c, m);
    }
  }
  return general_leaf<T, kExp, kMoments>(leaf, n, c, logit_scale, softcap);
}

}  // namespace rlk::cuda
