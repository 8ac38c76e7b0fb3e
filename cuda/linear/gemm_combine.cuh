// Combines the sums of 1, 2, 4 or 8 segments of the contraction by a perfect binary tree (rule 2 of docs/numerics.md).
// The segments are computed one after another.
#pragma once

#include <cstdint>

namespace rlk::cuda {

template <int kN>
__device__ __forceinline__ void add_to(float (&sum)[kN], const float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) sum[i] = __fadd_rn(sum[i], d[i]);
}
template <int kN>
__device__ __forceinline__ void copy_to(float (&to)[kN], const float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) to[i] = d[i];
}

// Keeps a thread's sums in shared memory, as vectors of 16 bytes that lie `stride` bytes apart from `address` on.
template <int kN>
struct KeptInShared {
  std::uint32_t address, stride;
  __device__ __forceinline__ void put(const float (&d)[kN]) const {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address + i * stride), "f"(d[4 * i]),
                   "f"(d[4 * i + 1]), "f"(d[4 * i + 2]), "f"(d[4 * i + 3])
                   : "memory");
    }
  }
  __device__ __forceinline__ void add_to_it(float (&d)[kN]) const {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      float v[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(address + i * stride)
                   : "memory");
#pragma unroll
      for (int j = 0; j < 4; ++j) d[4 * i + j] = __fadd_rn(v[j], d[4 * i + j]);
    }
  }
};
// Keeps a thread's sums in registers.
template <int kN>
struct KeptInRegisters {
  float kept[kN];
  __device__ __forceinline__ void put(const float (&d)[kN]) { copy_to(kept, d); }
  __device__ __forceinline__ void add_to_it(float (&d)[kN]) const { add_to(d, kept); }
};

// Sets d to the tree sum of `segments` sums; sum_segment(d) computes the next sum. `half` stores the sum of the first
// four of eight segments.
template <int kN, class Kept, class SumSegment>
__device__ __forceinline__ void combine_segments(float (&d)[kN], int segments, Kept half, SumSegment sum_segment) {
  float pair[kN];
#pragma unroll 1
  for (int first = 0;; first += 4) {
    sum_segment(d);
    if (segments == 1) return;
    {
      float one[kN];
      copy_to(one, d);
      sum_segment(d);
      add_to(d, one);
    }
    if (segments == 2) return;
    copy_to(pair, d);
    sum_segment(d);
    {
      float one[kN];
      copy_to(one, d);
      sum_segment(d);
      add_to(d, one);
    }
    add_to(d, pair);
    if (segments == 4) return;
    if (first == 4) break;
    half.put(d);
  }
  half.add_to_it(d);
}

}  // namespace rlk::cuda
