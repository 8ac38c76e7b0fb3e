// THE CONTRACT of `rms_norm`: y = h / rms(h) * weight, with or without a residual added first, and its gradients.
// Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they show.
//
// Row i has K = columns values. For column k:
//   h      = x; with a residual h = round(fl(x + residual)) to dtype. This h is new_residual
//   sum(f) : a sum in 256 virtual lanes. Column k is in lane (k / 8) % 256. A lane is the chain s = f(k, s) over its
//            columns, ascending, from s = +0. A perfect binary tree adds the lanes; a lane without columns is +0. A
//            zero sum is +0
//   rstd   = fl(1 / fl(sqrt(fl(fl(sum(fma(h, h, s)) / K) + eps))))
//   xhat   = fl(h * rstd);  w = weight, or fl(weight + weight_offset) where the offset is not 0; w = 1 without a weight
//   y      = round(fl(xhat * w)); with round_before_weight round(fl(round(xhat) * w)). Both round to dtype, nearest
//            even
// Backward, from dy and d_new_residual (null means +0), with the saved h and rstd:
//   g      = fl(dy * w);  c = fl(sum(fma(g, xhat, s)) / K)
//   dx     = round(fma(rstd, fma(-xhat, c, g), d_new_residual)) to dtype; this is the residual's gradient, too
//   dw     = fold over blocks of 8192 rows (rule 9). A block has 128 groups of 64 consecutive rows. A group is the
//            chain fma(dy, z, s), ascending from +0, where z is xhat, or round(xhat) with round_before_weight. A
//            perfect binary tree over the groups' index adds the groups; a missing group is +0. The first block is
//            added to main_grad if given, else taken unchanged. Each later block is added to the result, ascending. The
//            result is rounded to dweight's dtype last
// The derivative of a rounding is taken as 1. With round_before_weight, g is therefore not rounded, and dw alone uses
// the rounded xhat. A row of y, new_residual, rstd or dx has the same bits for any number of rows, any position and
// stride. All outputs have the same bits on every backend. Every NaN result is the canonical NaN. A NaN makes its row
// NaN. Squares that overflow make rstd 0, so finite values give zeros and infinities give NaN. Other rows are not
// affected. The mean of an empty row is +0.
// All functions enqueue their work on `stream`; they neither allocate nor synchronise. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

constexpr int kRmsNormLanes = 256;
constexpr int kRmsNormLaneColumns = 8;        // consecutive columns of a lane
constexpr std::int64_t kRmsNormBlock = 8192;  // rows per block of rule 9
constexpr int kRmsNormGroupRows = 64;

// Matrices may have any row layout; columns are contiguous. A call may work in place: y may be x, and new_residual may
// be residual.
struct RmsNormParams {
  const void* x = nullptr;         // [num_rows, columns], dtype
  const void* residual = nullptr;  // [num_rows, columns], dtype, or null
  const void* weight = nullptr;    // [columns], weight_dtype, or null
  void* y = nullptr;               // [num_rows, columns], dtype, or null: not wanted
  void* new_residual = nullptr;    // [num_rows, columns], dtype; given if and only if residual is
  float* rstd = nullptr;           // [num_rows], or null: not wanted
  RowLayout x_rows, residual_rows, y_rows, new_residual_rows;
  std::int64_t num_rows = 0, columns = 0;
  DType dtype = DType::kBFloat16;         // kBFloat16, kFloat16, kFloat32
  DType weight_dtype = DType::kBFloat16;  // dtype or kFloat32
  float eps = 0.0f;                       // finite, > 0
  float weight_offset = 0.0f;             // finite; 0 without a weight
  bool round_before_weight = false;
};
void rms_norm(const RmsNormParams& p, Device device, Stream stream);

struct RmsNormBackwardParams {
  const void* dy = nullptr;              // [num_rows, columns], dtype
  const void* h = nullptr;               // [num_rows, columns], dtype: new_residual, or x if there was no residual
  const void* weight = nullptr;          // [columns], weight_dtype, or null
  const float* rstd = nullptr;           // [num_rows], as forward returned it
  const void* d_new_residual = nullptr;  // [num_rows, columns], dtype, or null
  const float* main_grad = nullptr;      // [columns], or null; may be dweight itself
  void* dx = nullptr;                    // [num_rows, columns], dtype, or null: not wanted
  void* dweight = nullptr;               // [columns], dweight_dtype, or null: not wanted
  RowLayout dy_rows, h_rows, d_new_residual_rows, dx_rows;
  std::int64_t num_rows = 0, columns = 0;
  DType dtype = DType::kBFloat16;
  DType weight_dtype = DType::kBFloat16;   // dtype or kFloat32
  DType dweight_dtype = DType::kBFloat16;  // dtype or kFloat32
  float weight_offset = 0.0f;
  bool round_before_weight = false;
  void* workspace = nullptr;  // rms_norm_backward_workspace_bytes(...), 16-byte aligned
};
// On a GPU with dweight wanted, 4 bytes for each column of each group of 64 rows; else 0.
std::int64_t rms_norm_backward_workspace_bytes(const RmsNormBackwardParams& p, Device device);
void rms_norm_backward(const RmsNormBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
