// mma.sync.m16n8k16 with fp32 accumulators, and ldmatrix, which loads its operands from shared memory.
//
// Let g = lane / 4 and t = lane % 4. A pair is two elements with neighbouring k in a word; the lower k is in the low
// half. A lane holds
//   A [16, 16]   the pairs (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
//   B [16, 8]    the pairs (k 2t, column g), (2t + 8, g)
//   C [16, 8]    (row g, columns 2t and 2t + 1), then row g + 8
#pragma once

#include <cstdint>
#include <type_traits>

#include "element.cuh"

namespace rlk::cuda {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  static_assert(std::is_same_v<T, Bf16> || std::is_same_v<T, Fp16>);
  if constexpr (std::is_same_v<T, Bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Loads four 8x8 matrices of 16-bit elements. Lane i passes the address of row i % 8 of matrix i / 8. A lane gets
// elements 2t and 2t + 1 of row g of each matrix. With kTransposed, a lane gets element g of rows 2t and 2t + 1 of each
// matrix.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices_4(std::uint32_t (&r)[4], std::uint32_t shared) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  }
}

__device__ __forceinline__ void store_shared_16(std::uint32_t shared, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace rlk::cuda
