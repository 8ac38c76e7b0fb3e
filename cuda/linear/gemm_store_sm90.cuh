// Stores accumulators. A warp rearranges its fragments as rows in a staging area of shared memory, and TMA stores the
// rows. If rows of d are read again, the warp stores them itself, 16 bytes per lane. If rows do not begin at multiples
// of 16 bytes, the warp stores them element by element, and neighbouring lanes store neighbouring elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../common/element_dtype.cuh"
#include "../common/tma_sm90.cuh"
#include "gemm_launch.h"

namespace rlk::cuda {

constexpr int kStagingPitch = 144;                 // 128 bytes of a row, and 16 bytes to avoid bank conflicts
constexpr int kStagingBytes = 16 * kStagingPitch;  // bytes per warp
constexpr int kStoreBoxRows = 64, kStoreBoxBytes = kStoreBoxRows * 128;  // box of a warpgroup

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(both);
}
__device__ __forceinline__ std::uint32_t pack_f16(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(both);
}

__device__ __forceinline__ void store_matrices(std::uint32_t shared, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                               std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t shared, std::uint32_t a, std::uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared), "r"(a), "r"(b)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(std::uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared));
  return v;
}

// The values that are added to a chunk's sums: the addend for the first chunk, and d for later chunks.
struct Addend {
  const float* data;  // null: nothing is added
  std::int64_t stride;
  bool vectors;  // whether rows begin at multiples of 16 bytes
};
__device__ __forceinline__ Addend addend_of(const GemmLaunch& g, bool first_chunk) {
  if (first_chunk) return {g.addend, g.addend_stride, g.vector_addend};
  return {static_cast<const float*>(g.d), g.d_stride, g.vector_stores};
}

template <class Element>
__device__ __forceinline__ void store_vector(const GemmLaunch& g, const uint4& v, int r, int c) {
  constexpr int kPerVector = 16 / static_cast<int>(sizeof(Element));
  if (r >= g.rows || c >= g.columns) return;
  Element* to = static_cast<Element*>(g.d) + r * g.d_stride + c;
  if (g.vector_stores && c + kPerVector <= g.columns) {
    *reinterpret_cast<uint4*>(to) = v;
  } else {
    const Element* from = reinterpret_cast<const Element*>(&v);
#pragma unroll
    for (int j = 0; j < kPerVector; ++j) {
      if (c + j < g.columns) to[j] = from[j];
    }
  }
}

__device__ __forceinline__ void load_shared(std::uint16_t* v, std::uint32_t shared) {
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(*v) : "r"(shared));
}
__device__ __forceinline__ void load_shared(float* v, std::uint32_t shared) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(*v) : "r"(shared));
}

// Stores the warp's rows [row, row + 16), columns [column, column + kWidth), from the warp's staging memory. The kWidth
// columns have 128 bytes, or fewer at the tile's end, because later columns belong to another tile.
template <class Element, int kWidth>
__device__ __forceinline__ void store_chunk(const GemmLaunch& g, std::uint32_t staging, int row, int column, int lane) {
  constexpr int kBytes = static_cast<int>(sizeof(Element));
  if (!g.vector_stores) {
    Element* to = static_cast<Element*>(g.d) + row * g.d_stride + column + lane;
    const int rows = min(16, g.rows - row), columns = min(kWidth, g.columns - column);
#pragma unroll 1
    for (int i = 0; i < rows; ++i, to += g.d_stride, staging += kStagingPitch) {
#pragma unroll
      for (int c = 0; c < kWidth; c += 32) {
        Element v;
        load_shared(&v, staging + (c + lane) * kBytes);
        if (c + lane < columns) to[c] = v;
      }
    }
    return;
  }
  if (lane % 8 * 16 >= kWidth * kBytes) return;
  const int r = lane / 8, c = column + lane % 8 * 16 / kBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_vector<Element>(g, load_shared_16(staging + (4 * i + r) * kStagingPitch + lane % 8 * 16), row + 4 * i + r, c);
  }
}

// Loads the addend for a warp's 16 rows of the tile, in wgmma's layout. If `kAdds` is true, the addend is added to the
// sums; otherwise the addend replaces the sums.
template <int kBN, bool kAdds>
__device__ __forceinline__ void take_addend(const GemmLaunch& g, const Addend& addend, float (&d)[kBN / 2], int row,
                                            int column, int lane) {
  const auto take = [&](int i, float x) { d[i] = kAdds ? __fadd_rn(x, d[i]) : x; };
  const float* const from = addend.data + (row + lane / 4) * addend.stride + column + lane % 4 * 2;
  if (addend.vectors && row + 16 <= g.rows && column + kBN <= g.columns) {
    constexpr int kColumns = kBN / 8, kBatch = kAdds && kColumns % 2 == 0 ? kColumns / 2 : kColumns;
#pragma unroll
    for (int first = 0; first < kColumns; first += kBatch) {
      float2 x[2 * kBatch];  // all loads are issued together; separate loads would each wait for memory (README.md)
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          asm volatile("ld.global.v2.f32 {%0, %1}, [%2];"
                       : "=f"(x[2 * j + i].x), "=f"(x[2 * j + i].y)
                       : "l"(from + 8 * i * addend.stride + 8 * (first + j))
                       : "memory");
        }
      }
#pragma unroll
      for (int j = 0; j < 2 * kBatch; ++j) {
        take(4 * first + 2 * j, x[j].x);
        take(4 * first + 2 * j + 1, x[j].y);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kBN / 8; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool exists = row + lane / 4 + 8 * i < g.rows && column + 8 * j + lane % 4 * 2 + k < g.columns;
        take(4 * j + 2 * i + k, exists ? from[8 * i * addend.stride + 8 * j + k] : 0.0f);
      }
    }
  }
}

template <int kBN>
__device__ __forceinline__ void add_bias(const GemmLaunch& g, float (&d)[kBN / 2], int column, int lane) {
  if (g.bias == nullptr) return;
#pragma unroll
  for (int j = 0; j < kBN / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = column + 8 * j + lane % 4 * 2 + i;
      const float b = c < g.columns ? load_element(g.bias, g.bias_dtype, c) : 0.0f;
      d[4 * j + i] = __fadd_rn(d[4 * j + i], b);
      d[4 * j + 2 + i] = __fadd_rn(d[4 * j + 2 + i], b);
    }
  }
}

// Stores a warpgroup's 64 rows of the tile by TMA, 128 bytes of each row at a time. The rows pass through kBuffers
// boxes in the warpgroup's staging memory. The type `Stored` is Bf16 or Fp16 if the caller knows that d has this type
// and no bias; otherwise it is void.
template <int kBN, int kBuffers, class Stored = void>
__device__ __forceinline__ void store_boxes(const GemmLaunch& g, const CUtensorMap& map, float (&d)[kBN / 2],
                                            std::uint32_t staging, int warpgroup, int row, int column) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const bool stores = threadIdx.x % 128 == 0;
  constexpr bool kIsKnown = !std::is_void_v<Stored>;
  if constexpr (!kIsKnown) add_bias<kBN>(g, d, column, lane);
  const auto all_warps = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); };
  // The swizzled address of the 16-byte chunk `chunk` of a row's 128 bytes.
  const auto place = [](std::uint32_t box, int r, int chunk) { return box + r * 128 + ((chunk ^ (r & 7)) << 4); };
  const auto begin = [&](int i) {
    if (stores) i == 0 ? wait_for_stored_boxes<0>() : wait_for_stored_boxes<kBuffers - 1>();
    all_warps();
    return staging + i % kBuffers * kStoreBoxBytes;
  };
  const auto end = [&](std::uint32_t box, int first_column) {
    fence_for_tma();
    all_warps();
    if (stores) store_box(&map, box, first_column, row);
  };
  if (!kIsKnown && g.d_dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kBN / 32; ++i) {
      const std::uint32_t box = begin(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* v = d + 4 * (4 * i + j);
        const std::uint32_t to = place(box, warp_row + lane / 4, 2 * j + lane % 4 / 2) + lane % 2 * 8;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v[0]), "f"(v[1]) : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + 8 * 128), "f"(v[2]), "f"(v[3]) : "memory");
      }
      end(box, column + i * 32);
    }
    return;
  }
  const bool bf16 = kIsKnown ? std::is_same_v<Stored, Bf16> : g.d_dtype == DType::kBFloat16;
#pragma unroll
  for (int i = 0; i < kBN / 64; ++i) {
    const std::uint32_t box = begin(i);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* v = d + 4 * (8 * i + j);
      const std::uint32_t to = place(box, warp_row + lane % 16, j + lane / 16);
      if (bf16) {
        store_matrices(to, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
      } else {
        store_matrices(to, pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7]));
      }
    }
    end(box, column + i * 64);
  }
}

// Stores a warp's 16 rows of the tile.
template <int kBN>
__device__ __forceinline__ void store_rows(const GemmLaunch& g, float (&d)[kBN / 2], std::uint32_t staging, int row,
                                           int column, int lane) {
  add_bias<kBN>(g, d, column, lane);
  if (g.d_dtype == DType::kFloat32) {
#pragma unroll
    for (int chunk = 0; chunk < kBN / 32 + (kBN % 32 != 0); ++chunk) {
      const std::uint32_t at = staging + lane / 4 * kStagingPitch + lane % 4 * 8;
#pragma unroll
      for (int j = chunk * 4; j < chunk * 4 + 4 && j < kBN / 8; ++j) {
        const std::uint32_t to = at + (j - chunk * 4) * 32;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(d[4 * j]), "f"(d[4 * j + 1]) : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + 8 * kStagingPitch), "f"(d[4 * j + 2]),
                     "f"(d[4 * j + 3])
                     : "memory");
      }
      __syncwarp();
      if (kBN % 32 == 0 || chunk < kBN / 32) {
        store_chunk<float, 32>(g, staging, row, column + chunk * 32, lane);
      } else {
        store_chunk<float, std::max(kBN % 32, 1)>(g, staging, row, column + chunk * 32, lane);
      }
      __syncwarp();
    }
    return;
  }
  const bool bf16 = g.d_dtype == DType::kBFloat16;
#pragma unroll
  for (int chunk = 0; chunk < kBN / 64 + (kBN % 64 != 0); ++chunk) {
    const std::uint32_t at = staging + lane % 16 * kStagingPitch + lane / 16 * 16;
#pragma unroll
    for (int j = chunk * 8; j < chunk * 8 + 8 && j < kBN / 8; j += 2) {
      const float* v = d + 4 * j;
      const std::uint32_t to = at + (j - chunk * 8) * 16;
      if (bf16) {
        store_matrices(to, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
      } else {
        store_matrices(to, pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7]));
      }
    }
    __syncwarp();
    if (kBN % 64 == 0 || chunk < kBN / 64) {
      store_chunk<std::uint16_t, 64>(g, staging, row, column + chunk * 64, lane);
    } else {
      store_chunk<std::uint16_t, std::max(kBN % 64, 1)>(g, staging, row, column + chunk * 64, lane);
    }
    __syncwarp();
  }
}

// Stores a tile of a transposed product, in which the weights are the first operand. The accumulators hold 16 columns
// of d by kBN rows.
template <int kBN>
__device__ __forceinline__ void store_columns(const GemmLaunch& g, float (&d)[kBN / 2], std::uint32_t staging, int row,
                                              int column, int lane) {
  if (g.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = column + lane / 4 + 8 * i;
      const float b = c < g.columns ? load_element(g.bias, g.bias_dtype, c) : 0.0f;
#pragma unroll
      for (int j = 0; j < kBN / 8; ++j) {
        d[4 * j + 2 * i] = __fadd_rn(d[4 * j + 2 * i], b);
        d[4 * j + 2 * i + 1] = __fadd_rn(d[4 * j + 2 * i + 1], b);
      }
    }
  }
  const bool bf16 = g.d_dtype == DType::kBFloat16, wide = g.d_dtype == DType::kFloat32;
#pragma unroll
  for (int j = 0; j < kBN / 8; ++j) {  // eight rows of d
    if (wide) {
      constexpr int kPitch = 80;  // bytes between rows of 16 columns
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t to = staging + (lane % 4 * 2 + i % 2) * kPitch + (lane / 4 + i / 2 * 8) * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(d[4 * j + i]) : "memory");
      }
      __syncwarp();
      store_vector<float>(g, load_shared_16(staging + lane / 4 * kPitch + lane % 4 * 16), row + 8 * j + lane / 4,
                          column + lane % 4 * 4);
    } else {
      constexpr int kPitch = 48;
      const float* v = d + 4 * j;
      const std::uint32_t low = bf16 ? pack_bf16(v[0], v[1]) : pack_f16(v[0], v[1]);
      const std::uint32_t high = bf16 ? pack_bf16(v[2], v[3]) : pack_f16(v[2], v[3]);
      store_matrices_transposed(staging + lane % 8 * kPitch + lane / 8 % 2 * 16, low, high);
      __syncwarp();
      if (lane < 16) {
        store_vector<std::uint16_t>(g, load_shared_16(staging + lane / 2 * kPitch + lane % 2 * 16),
                                    row + 8 * j + lane / 2, column + lane % 2 * 8);
      }
    }
    __syncwarp();
  }
}

}  // namespace rlk::cuda
