// The inner loops of the operator `rms_norm`. CMake compiles rms_norm_simd.cpp once per instruction set. A row is
// widened once into fp32 scratch that stays in L1 or L2. All other steps read this scratch.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/rms_norm.h"

namespace rlk::cpu {

// The scratch of a row has padded_columns floats; floats past its columns are +0.
constexpr std::int64_t kRmsNormPadding = 128;  // eight columns of each lane of the widest vector
RLK_HD std::int64_t padded_columns(std::int64_t columns) {
  return (columns + kRmsNormPadding - 1) / kRmsNormPadding * kRmsNormPadding;
}

// Arguments for one row of forward. The arrays may have any alignment.
struct RmsNormRow {
  const unsigned char *x, *residual;  // residual may be null
  unsigned char *new_residual, *y;    // y may be null
  const float* weight;                // [columns], offset included, or null
  std::int64_t columns;
  DType dtype;
  bool round_before_weight;
  float* h;  // scratch
};

// Arguments for one row of backward.
struct RmsNormBackwardRow {
  const unsigned char *dy, *h, *d_new_residual;  // d_new_residual may be null
  unsigned char* dx;
  const float* weight;
  std::int64_t columns;
  DType dtype;
  bool round_before_weight;
  float rstd;
  float *g, *xhat;  // scratch
  float* sums;      // [columns]: dweight's chains, which are continued; null if not wanted here
};

struct RmsNormLanes {
  // to[k] = weight[k] with the offset.
  void (*load_weight)(const unsigned char* weight, DType dtype, float offset, std::int64_t columns, float* to);
  // Fills h and new_residual; returns the sum of squares.
  float (*load_row)(const RmsNormRow& row);
  void (*store_row)(const RmsNormRow& row, float rstd);
  void (*backward_row)(const RmsNormBackwardRow& row);
  // Continues the chains of dweight alone, for columns [first, first + count). `sums` points to the chain of column
  // `first`.
  void (*add_to_sums)(const RmsNormBackwardRow& row, std::int64_t first, std::int64_t count);
  void (*store)(const float* sums, std::int64_t count, unsigned char* to, DType dtype);
};

RLK_CPU_LANES(RmsNormLanes, rms_norm_simd)

}  // namespace rlk::cpu
