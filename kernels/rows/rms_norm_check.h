// Every backend checks these preconditions of an rms_norm call, because a violation would corrupt memory. Users' input
// is checked earlier, by the bindings.
#pragma once

#include "rlk/ops/rms_norm.h"

namespace rlk {

inline void check_rms_norm_shape(std::int64_t num_rows, std::int64_t columns, DType dtype, const void* weight,
                                 DType weight_dtype) {
  const auto is_float = [](DType t) { return t == DType::kFloat32 || t == DType::kBFloat16 || t == DType::kFloat16; };
  RLK_CHECK(num_rows >= 0 && columns >= 0, "rms_norm: sizes are not negative");
  RLK_CHECK(num_rows < std::int64_t{1} << 32, "rms_norm: fewer than 2^32 rows");
  RLK_CHECK(columns < std::int64_t{1} << 31, "rms_norm: fewer than 2^31 columns");
  RLK_CHECK(is_float(dtype), "rms_norm: x is float32, bfloat16 or float16");
  RLK_CHECK(weight == nullptr || weight_dtype == dtype || weight_dtype == DType::kFloat32,
            "rms_norm: weight has x's type or float32");
}

inline void check_rms_norm(const RmsNormParams& p) {
  check_rms_norm_shape(p.num_rows, p.columns, p.dtype, p.weight, p.weight_dtype);
  RLK_CHECK(p.eps > 0.0f && p.eps <= 3.4028235e38f, "rms_norm: eps is finite and > 0");
  if (p.num_rows == 0) return;
  RLK_CHECK((p.residual == nullptr) == (p.new_residual == nullptr) || p.columns == 0,
            "rms_norm: residual and new_residual come together");
  RLK_CHECK(p.x_rows.inner > 0 && p.residual_rows.inner > 0 && p.y_rows.inner > 0 && p.new_residual_rows.inner > 0,
            "rms_norm: row layouts have inner >= 1");
  RLK_CHECK(p.columns == 0 || p.x, "rms_norm: x is given");
}

inline void check_rms_norm_backward(const RmsNormBackwardParams& p) {
  check_rms_norm_shape(p.num_rows, p.columns, p.dtype, p.weight, p.weight_dtype);
  RLK_CHECK(p.dweight == nullptr || p.dweight_dtype == p.dtype || p.dweight_dtype == DType::kFloat32,
            "rms_norm_backward: dweight has dy's type or float32");
  if (p.num_rows == 0 || p.columns == 0) return;
  RLK_CHECK(p.dy_rows.inner > 0 && p.h_rows.inner > 0 && p.d_new_residual_rows.inner > 0 && p.dx_rows.inner > 0,
            "rms_norm_backward: row layouts have inner >= 1");
  RLK_CHECK(p.dy && p.h && p.rstd, "rms_norm_backward: dy, h and rstd are given");
}

}  // namespace rlk
