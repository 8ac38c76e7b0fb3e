// A second implementation of rms_norm, slow and independent of the backends, written from the contract, ops/rms_norm.h.
// The reference shares only the formats with the backends (linear_reference.h reads and rounds patterns).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "linear_reference.h"
#include "rlk/ops/rms_norm.h"

namespace rms_norm_test {

using linear_test::load_pattern;
using linear_test::Patterns;
using linear_test::rounded;
using linear_test::tree;
using linear_test::value_of;
using rlk::DType;

// The contract's sum of fma(a, b, s).
inline float lane_sum(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> lanes(256, 0.0f);
  for (std::size_t k = 0; k < a.size(); ++k) {
    float& lane = lanes[k / 8 % 256];
    lane = std::fma(a[k], b[k], lane);
  }
  const float sum = tree(lanes);
  return sum == 0.0f ? 0.0f : sum;
}

inline std::vector<float> row_of(const void* data, const rlk::RowLayout& rows, std::int64_t row, std::int64_t columns,
                                 DType t) {
  std::vector<float> v;
  for (std::int64_t k = 0; k < columns; ++k) v.push_back(value_of(load_pattern(data, t, rows.offset(row) + k), t));
  return v;
}

template <class Params>
std::vector<float> weight_of(const Params& p) {
  std::vector<float> w;
  for (std::int64_t k = 0; k < p.columns; ++k) {
    float value = p.weight == nullptr ? 1.0f : value_of(load_pattern(p.weight, p.weight_dtype, k), p.weight_dtype);
    if (p.weight_offset != 0.0f) value = value + p.weight_offset;
    w.push_back(value);
  }
  return w;
}

struct Forward {
  Patterns y, new_residual, rstd;
};

inline Forward reference(const rlk::RmsNormParams& p) {
  Forward f;
  const std::vector<float> w = weight_of(p);
  for (std::int64_t i = 0; i < p.num_rows; ++i) {
    std::vector<float> h = row_of(p.x, p.x_rows, i, p.columns, p.dtype);
    if (p.residual != nullptr) {
      const auto residual = row_of(p.residual, p.residual_rows, i, p.columns, p.dtype);
      for (std::size_t k = 0; k < h.size(); ++k) {
        f.new_residual.push_back(rounded(h[k] + residual[k], p.dtype));
        h[k] = value_of(f.new_residual.back(), p.dtype);
      }
    }
    const float mean = h.empty() ? 0.0f : lane_sum(h, h) / static_cast<float>(p.columns);
    const float shifted = mean + p.eps;
    const float root = std::sqrt(shifted);
    const float rstd = 1.0f / root;
    f.rstd.push_back(rounded(rstd, DType::kFloat32));
    for (std::size_t k = 0; k < h.size(); ++k) {
      float xhat = h[k] * rstd;
      if (p.round_before_weight) xhat = value_of(rounded(xhat, p.dtype), p.dtype);
      f.y.push_back(rounded(xhat * w[k], p.dtype));
    }
  }
  return f;
}

struct Backward {
  Patterns dx, dweight;
};

inline Backward reference(const rlk::RmsNormBackwardParams& p) {
  Backward b;
  const std::vector<float> w = weight_of(p);
  const auto columns = static_cast<std::size_t>(p.columns);
  std::vector<float> total(columns, 0.0f);
  if (p.main_grad != nullptr) total.assign(p.main_grad, p.main_grad + p.columns);
  for (std::int64_t block = 0; block < p.num_rows; block += 8192) {
    std::vector<std::vector<float>> groups(128, std::vector<float>(columns, 0.0f));
    for (std::int64_t i = block; i < p.num_rows && i < block + 8192; ++i) {
      const auto dy = row_of(p.dy, p.dy_rows, i, p.columns, p.dtype), h = row_of(p.h, p.h_rows, i, p.columns, p.dtype);
      std::vector<float> e(columns, 0.0f), g(columns), xhat(columns);
      if (p.d_new_residual != nullptr) e = row_of(p.d_new_residual, p.d_new_residual_rows, i, p.columns, p.dtype);
      for (std::size_t k = 0; k < columns; ++k) {
        g[k] = dy[k] * w[k];
        xhat[k] = h[k] * p.rstd[i];
        const float z = p.round_before_weight ? value_of(rounded(xhat[k], p.dtype), p.dtype) : xhat[k];
        float& chain = groups[static_cast<std::size_t>((i - block) / 64)][k];
        chain = std::fma(dy[k], z, chain);
      }
      const float c = lane_sum(g, xhat) / static_cast<float>(p.columns);
      for (std::size_t k = 0; k < columns; ++k) {
        b.dx.push_back(rounded(std::fma(p.rstd[i], std::fma(-xhat[k], c, g[k]), e[k]), p.dtype));
      }
    }
    for (std::size_t k = 0; k < columns; ++k) {
      std::vector<float> chains;
      for (const auto& group : groups) chains.push_back(group[k]);
      const float of_block = tree(chains);
      total[k] = block == 0 && p.main_grad == nullptr ? of_block : total[k] + of_block;
    }
  }
  for (const float sum : total) b.dweight.push_back(rounded(sum, p.dweight_dtype));
  return b;
}

}  // namespace rms_norm_test
