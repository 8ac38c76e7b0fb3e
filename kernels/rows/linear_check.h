// Every backend checks these preconditions of a linear call, because a violation would corrupt memory. Users' input is
// checked earlier, by the bindings.
#pragma once

#include <bit>

#include "rlk/ops/linear.h"

namespace rlk {

inline bool is_floating(DType t) { return t == DType::kFloat32 || t == DType::kBFloat16 || t == DType::kFloat16; }

// The checks that the three products share. If a backend lacks an element type, the backend itself reports that.
inline void check_linear_product(DType dtype, Arithmetic arithmetic, std::int64_t num_rows, std::int64_t in_features,
                                 std::int64_t out_features) {
  RLK_CHECK(num_rows >= 0 && in_features >= 0 && out_features >= 0, "linear: sizes are not negative");
  RLK_CHECK(num_rows < std::int64_t{1} << 32, "linear: fewer than 2^32 rows");
  RLK_CHECK(is_floating(dtype), "linear: operands are float32, bfloat16 or float16");
  RLK_CHECK(arithmetic <= Arithmetic::kGfx942, "linear: the arithmetic is a known one");
  RLK_CHECK(dtype != DType::kFloat32 || arithmetic == Arithmetic::kIeee,
            "linear: float32 operands have ieee arithmetic alone");
}

inline void check_linear(const LinearParams& p) {
  check_linear_product(p.dtype, p.arithmetic, p.num_rows, p.in_features, p.out_features);
  RLK_CHECK(std::has_single_bit(static_cast<unsigned>(p.k_segments)) && p.k_segments <= kMaxSegments,
            "linear: 1, 2, 4 or 8 segments");
  RLK_CHECK(p.k_segments == 1 || p.in_features % (16 * p.k_segments) == 0,
            "linear: in_features is a multiple of 16 * k_segments");
  RLK_CHECK(is_floating(p.out_dtype) && (p.dtype != DType::kFloat32 || p.out_dtype == DType::kFloat32),
            "linear: y is float32, bfloat16 or float16, and float32 where the operands are");
  RLK_CHECK(p.bias == nullptr || is_floating(p.bias_dtype), "linear: bias is float32, bfloat16 or float16");
  RLK_CHECK(p.start == nullptr || p.k_segments == 1, "linear: with start there is one segment");
  if (p.num_rows == 0 || p.out_features == 0) return;
  RLK_CHECK(p.x_rows.inner > 0 && p.y_rows.inner > 0, "linear: row layouts have inner >= 1");
  RLK_CHECK(p.y != nullptr, "linear: y is given");
  RLK_CHECK(p.in_features == 0 || (p.x && p.weight), "linear: x and weight are given");
  RLK_CHECK(p.start == nullptr || p.num_rows == 1 || p.start_stride >= p.out_features,
            "linear: rows of start do not overlap");
}

inline void check_linear_input_grad(const LinearInputGradParams& p) {
  check_linear_product(p.dtype, p.arithmetic, p.num_rows, p.in_features, p.out_features);
  RLK_CHECK(p.dx_dtype == p.dtype || p.dx_dtype == DType::kFloat32,
            "linear_input_grad: dx has the operands' type or float32");
  if (p.num_rows == 0 || p.in_features == 0) return;
  RLK_CHECK(p.dy_rows.inner > 0 && p.dx_rows.inner > 0, "linear_input_grad: row layouts have inner >= 1");
  RLK_CHECK(p.dx != nullptr, "linear_input_grad: dx is given");
  RLK_CHECK(p.out_features == 0 || (p.dy && p.weight), "linear_input_grad: dy and weight are given");
  RLK_CHECK(p.start == nullptr || p.num_rows == 1 || p.start_stride >= p.in_features,
            "linear_input_grad: rows of start do not overlap");
}

inline void check_linear_weight_grad(const LinearWeightGradParams& p) {
  check_linear_product(p.dtype, p.arithmetic, p.num_rows, p.in_features, p.out_features);
  RLK_CHECK(p.dweight_dtype == p.dtype || p.dweight_dtype == DType::kFloat32,
            "linear_weight_grad: dweight has the operands' type or float32");
  if (p.in_features == 0 || p.out_features == 0) return;
  RLK_CHECK(p.dy_rows.inner > 0 && p.x_rows.inner > 0, "linear_weight_grad: row layouts have inner >= 1");
  RLK_CHECK(p.dweight != nullptr, "linear_weight_grad: dweight is given");
  RLK_CHECK(p.row_limit == nullptr || p.num_rows <= kTokenBlock, "linear_weight_grad: a row limit is of one block");
  RLK_CHECK(p.num_rows == 0 || (p.dy && p.x), "linear_weight_grad: dy and x are given");
}

inline void check_linear_bias_grad(const LinearBiasGradParams& p) {
  RLK_CHECK(p.num_rows >= 0 && p.out_features >= 0, "linear_bias_grad: sizes are not negative");
  RLK_CHECK(p.num_rows < std::int64_t{1} << 32, "linear_bias_grad: fewer than 2^32 rows");
  RLK_CHECK(is_floating(p.dtype), "linear_bias_grad: dy is float32, bfloat16 or float16");
  RLK_CHECK(p.dbias_dtype == p.dtype || p.dbias_dtype == DType::kFloat32,
            "linear_bias_grad: dbias has dy's type or float32");
  if (p.out_features == 0) return;
  RLK_CHECK(p.dy_rows.inner > 0, "linear_bias_grad: row layouts have inner >= 1");
  RLK_CHECK(p.dbias != nullptr, "linear_bias_grad: dbias is given");
  RLK_CHECK(p.num_rows == 0 || p.dy, "linear_bias_grad: dy is given");
}

inline void check_tree_sum(const TreeSumParams& p) {
  RLK_CHECK(std::has_single_bit(static_cast<unsigned>(p.count)) && p.count <= kMaxSegments,
            "tree_sum: 1, 2, 4 or 8 parts");
  RLK_CHECK(p.size >= 0 && p.columns >= 0, "tree_sum: sizes are not negative");
  RLK_CHECK(is_floating(p.out_dtype), "tree_sum: sum is float32, bfloat16 or float16");
  RLK_CHECK(p.bias == nullptr || is_floating(p.bias_dtype), "tree_sum: bias is float32, bfloat16 or float16");
  if (p.size == 0) return;
  RLK_CHECK(p.bias == nullptr || (p.columns > 0 && p.size % p.columns == 0),
            "tree_sum: with a bias, size is a multiple of columns");
  RLK_CHECK(p.sum != nullptr, "tree_sum: sum is given");
  for (int i = 0; i < p.count; ++i) RLK_CHECK(p.parts[i] != nullptr, "tree_sum: every part is given");
}

}  // namespace rlk
