// Stores accumulators. A lane adds main_grad and bias to its pairs of columns. The four lanes of a quad then exchange
// 16-bit results, so each lane can store 16 bytes of one row.
#pragma once

#include <cstdint>

#include "../common/element_dtype.cuh"
#include "gemm.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// A warp's part of D: kRowTiles of 16 rows by kColumnTiles of 8 columns, laid out as mma's C.
template <int kRowTiles, int kColumnTiles>
using Accumulators = float[kRowTiles][kColumnTiles][4];

// Position of a lane's elements in D.
struct LanePosition {
  std::int64_t row, column;  // position of element 0 of tile (0, 0)
};

// Calls f(accumulator, element of the addend) for each existing element of a lane.
template <int kRowTiles, int kColumnTiles, class F>
__device__ __forceinline__ void for_each_addend(const GemmParams& p, const LanePosition& at,
                                                Accumulators<kRowTiles, kColumnTiles>& d, const F& f) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = at.row + i * 16 + half * 8;
      if (row >= p.m) continue;
      const float* from = p.addend + p.addend_rows.offset(row) + at.column;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (at.column + j * 8 + c >= p.n) continue;
          f(d[i][j][half * 2 + c], from[j * 8 + c]);
        }
      }
    }
  }
}

template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void add_bias(const GemmParams& p, const LanePosition& at,
                                         Accumulators<kRowTiles, kColumnTiles>& d) {
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const std::int64_t column = at.column + j * 8 + c;
      if (column >= p.n) continue;
      const float b = load_element(p.bias, p.bias_dtype, column);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        d[i][j][c] = __fadd_rn(d[i][j][c], b);
        d[i][j][2 + c] = __fadd_rn(d[i][j][2 + c], b);
      }
    }
  }
}

// Before the call, lane t of a quad has word t of four rows of four words each. Afterwards, lane t has row t.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const std::uint32_t received = __shfl_xor_sync(0xffffffff, odd ? w[j] : w[j + 1], 1);
    (odd ? w[j] : w[j + 1]) = received;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const std::uint32_t received = __shfl_xor_sync(0xffffffff, upper ? w[j] : w[j + 2], 2);
    (upper ? w[j] : w[j + 2]) = received;
  }
}

// Stores the first `count` 16-bit elements of `w`, which holds two per word.
template <int kWords>
__device__ __forceinline__ void store_elements(std::uint16_t* to, const std::uint32_t (&w)[kWords],
                                               std::int64_t count) {
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    if (2 * j < count) to[2 * j] = static_cast<std::uint16_t>(w[j]);
    if (2 * j + 1 < count) to[2 * j + 1] = static_cast<std::uint16_t>(w[j] >> 16);
  }
}

template <class T, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void store_rounded(const GemmParams& p, const LanePosition& at, bool vector, int lane,
                                              const Accumulators<kRowTiles, kColumnTiles>& d) {
  constexpr int kWords = kColumnTiles % 4 == 0 ? 4 : 1;  // column tiles whose words a quad exchanges
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = at.row + i * 16 + half * 8;
      std::uint16_t* to = static_cast<std::uint16_t*>(p.d) + (row < p.m ? p.d_rows.offset(row) : 0);
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += kWords) {
        std::uint32_t w[kWords];
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const float(&x)[4] = d[i][j + word];
          w[word] = T::pack(x[half * 2], x[half * 2 + 1]);
        }
        std::int64_t column = at.column + j * 8;
        if constexpr (kWords == 4) {
          transpose_in_quad(w, lane);
          column += lane % 4 * 6;  // moves `column` from pair t of tile j to the beginning of tile j + t
        }
        if (row >= p.m) continue;
        if (vector && column + 2 * kWords <= p.n) {
          if constexpr (kWords == 4) {
            *reinterpret_cast<uint4*>(to + column) = make_uint4(w[0], w[1], w[2], w[3]);
          } else {
            *reinterpret_cast<std::uint32_t*>(to + column) = w[0];
          }
        } else {
          store_elements(to + column, w, p.n - column);
        }
      }
    }
  }
}

template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void store_float(const GemmParams& p, const LanePosition& at, bool vector,
                                            const Accumulators<kRowTiles, kColumnTiles>& d) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = at.row + i * 16 + half * 8;
      if (row >= p.m) continue;
      float* to = static_cast<float*>(p.d) + p.d_rows.offset(row) + at.column;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const float low = d[i][j][half * 2], high = d[i][j][half * 2 + 1];
        const std::int64_t left = p.n - at.column - j * 8;
        if (vector && left >= 2) {
          *reinterpret_cast<float2*>(to + j * 8) = make_float2(low, high);
        } else {
          if (left >= 1) to[j * 8] = low;
          if (left >= 2) to[j * 8 + 1] = high;
        }
      }
    }
  }
}

// `vector`: rows of d begin at multiples of 16 bytes.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void store_tile(const GemmParams& p, const LanePosition& at, bool vector, int lane,
                                           Accumulators<kRowTiles, kColumnTiles>& d) {
  if (p.bias != nullptr) add_bias<kRowTiles, kColumnTiles>(p, at, d);
  if (p.d_dtype == DType::kFloat32) {
    store_float<kRowTiles, kColumnTiles>(p, at, vector, d);
  } else if (p.d_dtype == DType::kBFloat16) {
    store_rounded<Bf16, kRowTiles, kColumnTiles>(p, at, vector, lane, d);
  } else {
    store_rounded<Fp16, kRowTiles, kColumnTiles>(p, at, vector, lane, d);
  }
}

}  // namespace
}  // namespace rlk::cuda
