// A second implementation of rope, slow and independent of the backends, written from the contract, ops/rope.h. The
// reference shares only the formats with the backends (linear_reference.h reads and rounds patterns).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "linear_reference.h"
#include "rlk/ops/rope.h"

namespace rope_test {

using linear_test::load_pattern;
using linear_test::rounded;
using linear_test::value_of;
using rlk::DType;
using rlk::RopeHeads;
using rlk::RopeParams;
using rlk::TokenStrides;

// Offsets in elements and the patterns that a call writes there.
using Written = std::map<std::int64_t, std::uint32_t>;

inline std::int64_t offset(const RopeParams& p, const TokenStrides& strides, std::int64_t token) {
  return token / p.inner_tokens * strides.outer + token % p.inner_tokens * strides.inner;
}

// cos or sin of a column of a token; NaN if its id is bad.
inline float angle_of(const RopeParams& p, const rlk::RopeAngles& angles, std::int64_t token, std::int64_t pair,
                      std::int64_t column) {
  int section = 0;
  if (p.num_sections == 3) {
    if (pair >= p.section_pairs[0]) section = 1;
    if (pair >= p.section_pairs[0] + p.section_pairs[1]) section = 2;
  }
  std::int64_t at = section * angles.section_stride + offset(p, angles.tokens, token);
  if (p.position_ids != nullptr) {
    const std::int64_t i = section * p.id_section_stride + offset(p, p.id_tokens, token);
    const std::int64_t id = p.id_dtype == DType::kInt32 ? static_cast<const std::int32_t*>(p.position_ids)[i]
                                                        : static_cast<const std::int64_t*>(p.position_ids)[i];
    if (id < 0 || id >= p.max_position) return std::numeric_limits<float>::quiet_NaN();
    at = id * angles.tokens.inner;
  }
  const std::uint32_t pattern =
      load_pattern(angles.data, p.angle_dtype, at + (p.width == p.rotary_dim ? column : pair));
  const float value = value_of(pattern, p.angle_dtype);
  return p.round_products ? value_of(rounded(value, p.dtype), p.dtype) : value;
}

inline Written reference(const RopeParams& p, const RopeHeads& heads) {
  Written written;
  const DType t = p.dtype;
  const auto round = [&](float x) { return value_of(rounded(x, t), t); };
  for (std::int64_t token = 0; token < p.num_tokens; ++token) {
    for (std::int64_t head = 0; head < heads.num_heads; ++head) {
      const std::int64_t x = offset(p, heads.x_tokens, token) + head * heads.x_head_stride;
      const std::int64_t y = offset(p, heads.y_tokens, token) + head * heads.y_head_stride;
      for (std::int64_t k = p.rotary_dim; k < p.head_dim; ++k) written[y + k] = load_pattern(heads.x, t, x + k);
      for (std::int64_t i = 0; i < p.rotary_dim / 2; ++i) {
        const std::int64_t a = p.interleaved ? 2 * i : i, b = p.interleaved ? 2 * i + 1 : i + p.rotary_dim / 2;
        const float xa = value_of(load_pattern(heads.x, t, x + a), t),
                    xb = value_of(load_pattern(heads.x, t, x + b), t);
        const float ca = angle_of(p, p.cos, token, i, a), cb = angle_of(p, p.cos, token, i, b);
        float sa = angle_of(p, p.sin, token, i, a), sb = angle_of(p, p.sin, token, i, b);
        if (p.transposed) {
          std::swap(sa, sb);
          sa = -sa;
          sb = -sb;
        }
        float ya, yb;
        if (p.round_products) {
          ya = round(xa * ca) - round(xb * sa);
          yb = round(xb * cb) + round(xa * sb);
        } else {
          const float after_a = xb * sa, after_b = xa * sb;
          ya = std::fma(xa, ca, -after_a);
          yb = std::fma(xb, cb, after_b);
        }
        written[y + a] = rounded(ya, t);
        written[y + b] = rounded(yb, t);
      }
    }
  }
  return written;
}

}  // namespace rope_test
