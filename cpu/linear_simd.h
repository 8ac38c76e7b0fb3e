// The inner loops of the operator `linear`. CMake compiles linear_simd.cpp once per instruction set. Operands are
// packed into fp32 panels of at most kPanelK contraction indices. A tile of outputs is one panel of A times one panel
// of B. Lanes hold outputs.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/base.h"
#include "rlk/ops/linear.h"

namespace rlk::cpu {

constexpr int kPanelK = 256;                // a B panel of 32 columns fills two thirds of a 48 KiB L1
constexpr int kPanelStride = kPanelK + 16;  // elements between rows of an A panel; no power of two, so rows fall into
                                            // different sets of L1

// The first `count` elements of some rows in memory, at any alignment.
struct LinearRows {
  const unsigned char* const* rows;
  std::int64_t num_rows, count;
  DType dtype;
};

// The unit that multiplies, and the type of the operands before packing.
struct LinearUnit {
  Arithmetic arithmetic;
  DType dtype;
};

// A tile of `rows` rows and tile_columns columns of outputs: sums += a . b over k indices, which continues earlier
// chains.
struct LinearTile {
  LinearUnit unit;
  const float* a;                   // [rows, kPanelStride]
  const std::int32_t* a_exponents;  // the same shape; used only by units that align products
  const float* b;                   // [k, tile_columns]
  const std::int32_t* b_exponents;  // [k, tile_columns / 2]
  float* sums;                      // [rows, sums_stride]
  std::int64_t rows, sums_stride;
  int k;  // a multiple of 16 unless the arithmetic is kIeee
};

struct LinearLanes {
  int tile_rows;     // a multiple of this number of rows is fastest
  int tile_columns;  // columns of a B panel
  // panel[r * stride + i] = rows[r][i], and panel[i * stride + r] = rows[r][i].
  void (*pack_rows)(const LinearRows& source, float* panel, std::int64_t stride);
  void (*pack_columns)(const LinearRows& source, float* panel, std::int64_t stride);
  // Prepares an operand for the unit: computes exponents, or flushes subnormals.
  void (*prepare_a)(const LinearUnit& unit, float* a, std::int32_t* exponents, std::int64_t rows, int k);
  void (*prepare_b)(const LinearUnit& unit, float* b, std::int32_t* exponents, int k);
  void (*multiply)(const LinearTile& tile);
  // out[j] = sums[j] + bias[j], rounded; bias may be null.
  void (*store)(const float* sums, std::int64_t count, const void* bias, DType bias_dtype, void* out, DType out_dtype);
  // sums[j] = the ascending chain of additions from +0 over rows[0][j], rows[1][j], ...
  void (*add_rows)(const LinearRows& source, float* sums);
  // out[j] = scale times the perfect binary tree over parts[0][j], ..., parts[num_parts - 1][j], rounded.
  void (*add_parts)(const float* const* parts, int num_parts, float scale, std::int64_t count, void* out,
                    DType out_dtype);
};

RLK_CPU_LANES(LinearLanes, linear_simd)

}  // namespace rlk::cpu
