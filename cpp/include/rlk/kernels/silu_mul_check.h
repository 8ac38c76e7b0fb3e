// Preconditions of a silu_mul call, on every backend: a violation would corrupt memory. Bindings check users' input.
#pragma once

#include "rlk/ops/silu_mul.h"

namespace rlk {

template <class Params>
void check_gated_mul_shape(const Params& p) {
  RLK_CHECK(p.num_rows >= 0 && p.columns >= 0, "silu_mul: sizes are not negative");
  RLK_CHECK(p.num_rows < std::int64_t{1} << 32, "silu_mul: fewer than 2^32 rows");
  RLK_CHECK(p.columns < std::int64_t{1} << 30, "silu_mul: fewer than 2^30 columns");
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "silu_mul: gate is float32, bfloat16 or float16");
  RLK_CHECK(p.activation <= Activation::kGeluTanh, "silu_mul: a known activation");
  if (p.num_rows == 0 || p.columns == 0) return;
  RLK_CHECK(p.gate && p.up, "silu_mul: gate and up are given");
  RLK_CHECK(p.gate_rows.inner > 0 && p.up_rows.inner > 0, "silu_mul: row layouts have inner >= 1");
}

inline void check_gated_mul(const GatedMulParams& p) {
  check_gated_mul_shape(p);
  if (p.num_rows == 0 || p.columns == 0) return;
  RLK_CHECK(p.y && p.y_rows.inner > 0, "silu_mul: y is given");
}

inline void check_gated_mul_backward(const GatedMulBackwardParams& p) {
  check_gated_mul_shape(p);
  if (p.num_rows == 0 || p.columns == 0) return;
  RLK_CHECK(p.dy && p.dy_rows.inner > 0, "silu_mul_backward: dy is given");
  RLK_CHECK(p.d_gate_rows.inner > 0 && p.d_up_rows.inner > 0, "silu_mul_backward: row layouts have inner >= 1");
}

}  // namespace rlk
