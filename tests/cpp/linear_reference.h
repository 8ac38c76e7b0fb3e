// A second implementation of linear, slow and independent of the backends, written from the contract, ops/linear.h.
// Every function gives the bit patterns of its outputs, row after row. The reference shares only the formats and the
// model of one step with the backends.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "rlk/math/half.h"
#include "rlk/math/mma_model.h"
#include "rlk/ops/linear.h"

namespace linear_test {

using rlk::Arithmetic;
using rlk::DType;
using rlk::RowLayout;

using Patterns = std::vector<std::uint32_t>;  // patterns of elements, in the low bits

inline std::uint32_t load_pattern(const void* array, DType t, std::int64_t i) {
  std::uint32_t pattern = 0;  // reads the low bytes: the hosts of this library are little-endian
  const auto bytes = static_cast<std::size_t>(rlk::size_of(t));
  std::memcpy(&pattern, static_cast<const unsigned char*>(array) + i * rlk::size_of(t), bytes);
  return pattern;
}

inline float value_of(std::uint32_t pattern, DType t) {
  if (t == DType::kFloat32) return std::bit_cast<float>(pattern);
  const auto half = static_cast<std::uint16_t>(pattern);
  return t == DType::kBFloat16 ? rlk::float_of_bf16(half) : rlk::float_of_f16(half);
}

inline std::uint32_t rounded(float x, DType t) {
  if (t == DType::kBFloat16) return rlk::bf16_rn(x);
  if (t == DType::kFloat16) return rlk::f16_rn(x);
  return std::isnan(x) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(x);
}

inline rlk::MmaUnit unit_of(Arithmetic a) {
  switch (a) {
    case Arithmetic::kSm80:
      return rlk::MmaUnit::kSm80;
    case Arithmetic::kGfx90a:
      return rlk::MmaUnit::kGfx90a;
    case Arithmetic::kGfx942:
      return rlk::MmaUnit::kGfx942;
    default:
      return rlk::MmaUnit::kSm90;
  }
}

// Rule 1, continued from `sum`.
inline float dot(Arithmetic arithmetic, DType t, const Patterns& a, const Patterns& b, float sum = 0.0f) {
  if (arithmetic == Arithmetic::kIeee) {
    for (std::size_t i = 0; i < a.size(); ++i) sum = std::fma(value_of(a[i], t), value_of(b[i], t), sum);
    return sum;
  }
  const std::vector<std::uint16_t> x(a.begin(), a.end()), y(b.begin(), b.end());
  return rlk::mma_dot(unit_of(arithmetic), t, x.data(), y.data(), static_cast<std::int64_t>(x.size()), sum);
}

// Elements of one row for columns [begin, end), and elements of one column for rows [begin, end).
inline Patterns along_row(const void* p, DType t, const RowLayout& rows, std::int64_t row, std::int64_t begin,
                          std::int64_t end) {
  Patterns v;
  for (std::int64_t i = begin; i < end; ++i) v.push_back(load_pattern(p, t, rows.offset(row) + i));
  return v;
}
inline Patterns along_column(const void* p, DType t, const RowLayout& rows, std::int64_t column, std::int64_t begin,
                             std::int64_t end) {
  Patterns v;
  for (std::int64_t i = begin; i < end; ++i) v.push_back(load_pattern(p, t, rows.offset(i) + column));
  return v;
}

inline RowLayout plain_rows(std::int64_t stride) { return {std::int64_t{1} << 40, 0, stride}; }

// Rule 2's tree, and rule 9's tree over groups.
inline float tree(std::vector<float> v) {
  while (v.size() > 1) {
    std::vector<float> next;
    for (std::size_t i = 0; i < v.size(); i += 2) next.push_back(v[i] + v[i + 1]);
    v = next;
  }
  return v[0];
}

inline Patterns reference(const rlk::LinearParams& p) {
  Patterns y;
  const std::int64_t segment = p.in_features / p.k_segments;
  for (std::int64_t m = 0; m < p.num_rows; ++m) {
    for (std::int64_t n = 0; n < p.out_features; ++n) {
      std::vector<float> d;
      for (std::int64_t s = 0; s < p.k_segments; ++s) {
        const auto x = along_row(p.x, p.dtype, p.x_rows, m, s * segment, (s + 1) * segment);
        const auto w = along_row(p.weight, p.dtype, plain_rows(p.weight_stride), n, s * segment, (s + 1) * segment);
        d.push_back(dot(p.arithmetic, p.dtype, x, w, p.start ? p.start[m * p.start_stride + n] : 0.0f));
      }
      float sum = tree(d);
      if (p.bias) sum = sum + value_of(load_pattern(p.bias, p.bias_dtype, n), p.bias_dtype);
      y.push_back(rounded(sum, p.out_dtype));
    }
  }
  return y;
}

inline Patterns reference(const rlk::LinearInputGradParams& p) {
  Patterns dx;
  for (std::int64_t m = 0; m < p.num_rows; ++m) {
    const auto dy = along_row(p.dy, p.dtype, p.dy_rows, m, 0, p.out_features);
    for (std::int64_t k = 0; k < p.in_features; ++k) {
      const auto w = along_column(p.weight, p.dtype, plain_rows(p.weight_stride), k, 0, p.out_features);
      const float start = p.start ? p.start[m * p.start_stride + k] : 0.0f;
      dx.push_back(rounded(dot(p.arithmetic, p.dtype, dy, w, start), p.dx_dtype));
    }
  }
  return dx;
}

inline Patterns reference(const rlk::LinearWeightGradParams& p) {
  Patterns dw;
  for (std::int64_t n = 0; n < p.out_features; ++n) {
    for (std::int64_t k = 0; k < p.in_features; ++k) {
      float sum = p.main_grad ? p.main_grad[n * p.main_grad_stride + k] : 0.0f;
      for (std::int64_t begin = 0; begin < p.num_rows; begin += 8192) {
        const std::int64_t end = begin + 8192 < p.num_rows ? begin + 8192 : p.num_rows;
        const float block = dot(p.arithmetic, p.dtype, along_column(p.dy, p.dtype, p.dy_rows, n, begin, end),
                                along_column(p.x, p.dtype, p.x_rows, k, begin, end));
        sum = begin == 0 && !p.main_grad ? block : sum + block;
      }
      dw.push_back(rounded(sum, p.dweight_dtype));
    }
  }
  return dw;
}

inline Patterns reference(const rlk::LinearBiasGradParams& p) {
  Patterns db;
  for (std::int64_t n = 0; n < p.out_features; ++n) {
    float sum = 0.0f;
    for (std::int64_t begin = 0; begin < p.num_rows; begin += 8192) {
      std::vector<float> groups(128, 0.0f);
      for (std::int64_t i = 0; i < 8192; ++i) {
        const std::int64_t m = begin + i;
        const float dy =
            m < p.num_rows ? value_of(load_pattern(p.dy, p.dtype, p.dy_rows.offset(m) + n), p.dtype) : 0.0f;
        auto& group = groups[static_cast<std::size_t>(i / 64)];
        group = group + dy;
      }
      sum = begin == 0 ? tree(groups) : sum + tree(groups);
    }
    db.push_back(rounded(sum, p.dbias_dtype));
  }
  return db;
}

inline Patterns reference(const rlk::TreeSumParams& p) {
  Patterns sum;
  for (std::int64_t i = 0; i < p.size; ++i) {
    std::vector<float> v;
    for (int part = 0; part < p.count; ++part) v.push_back(p.parts[part][i]);
    float whole = p.scale * tree(v);
    if (p.bias != nullptr) whole = whole + value_of(load_pattern(p.bias, p.bias_dtype, i % p.columns), p.bias_dtype);
    sum.push_back(rounded(whole, p.out_dtype));
  }
  return sum;
}

}  // namespace linear_test
