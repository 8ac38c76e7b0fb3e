// A slow second implementation of silu_mul and gelu_mul, written from the contract, ops/silu_mul.h, independent of the
// backends. The reference shares with them only the functions of docs/math.md and the formats: linear_reference.h reads
// and rounds patterns.
#pragma once

#include <cmath>
#include <cstdint>

#include "linear_reference.h"
#include "rlk/math/erf.h"
#include "rlk/math/exp.h"
#include "rlk/math/sigmoid.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/silu_mul.h"

namespace silu_mul_test {

using linear_test::load_pattern;
using linear_test::Patterns;
using linear_test::rounded;
using linear_test::value_of;
using rlk::Activation;
using rlk::DType;

struct Act {
  float value, slope;
};

inline Act act(Activation activation, float g) {
  const float m = g < -88.0f ? -88.0f : g, c = m > 88.0f ? 88.0f : m;
  if (activation == Activation::kSilu) {
    const float s = rlk::sigmoid(g), rest = 1.0f - s;
    return {m * s, s * std::fma(c, rest, 1.0f)};
  }
  const float half_m = 0.5f * m, square = c * c;
  if (activation == Activation::kGelu) {
    const float w = 1.0f + rlk::erf(g * static_cast<float>(std::sqrt(0.5)));
    const float density = static_cast<float>(1 / std::sqrt(2 * M_PI)) * rlk::exp(-0.5f * square);
    return {half_m * w, std::fma(c, density, 0.5f * w)};
  }
  const auto root = static_cast<float>(std::sqrt(2 / M_PI));
  const float g_square = g * g, cubic = 0.044715f * g_square;
  const float t = rlk::tanh(root * std::fma(cubic, g, g)), w = 1.0f + t;
  const float slope_of_inner = root * std::fma(static_cast<float>(3 * 0.044715), square, 1.0f);
  const float half_c = 0.5f * c, outer = half_c * std::fma(-t, t, 1.0f);
  return {half_m * w, std::fma(outer, slope_of_inner, 0.5f * w)};
}

inline float element(const void* data, const rlk::RowLayout& rows, std::int64_t row, std::int64_t column, DType t) {
  return value_of(load_pattern(data, t, rows.offset(row) + column), t);
}

inline Patterns reference(const rlk::GatedMulParams& p) {
  Patterns y;
  for (std::int64_t i = 0; i < p.num_rows; ++i) {
    for (std::int64_t k = 0; k < p.columns; ++k) {
      float b = act(p.activation, element(p.gate, p.gate_rows, i, k, p.dtype)).value;
      if (p.round_before_mul) b = value_of(rounded(b, p.dtype), p.dtype);
      y.push_back(rounded(b * element(p.up, p.up_rows, i, k, p.dtype), p.dtype));
    }
  }
  return y;
}

struct Backward {
  Patterns d_gate, d_up;
};

inline Backward reference(const rlk::GatedMulBackwardParams& p) {
  Backward r;
  for (std::int64_t i = 0; i < p.num_rows; ++i) {
    for (std::int64_t k = 0; k < p.columns; ++k) {
      const Act a = act(p.activation, element(p.gate, p.gate_rows, i, k, p.dtype));
      const float b = p.round_before_mul ? value_of(rounded(a.value, p.dtype), p.dtype) : a.value;
      const float dy = element(p.dy, p.dy_rows, i, k, p.dtype), u = element(p.up, p.up_rows, i, k, p.dtype);
      const float dy_u = dy * u;
      r.d_gate.push_back(rounded(dy_u * a.slope, p.dtype));
      r.d_up.push_back(rounded(dy * b, p.dtype));
    }
  }
  return r;
}

}  // namespace silu_mul_test
