// THE CONTRACT of `rope`: rotary position embedding of queries and keys, and the transpose of this map, which gives its
// gradient.
// Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they show.
//
// The first rotary_dim columns of a head form rotary_dim / 2 pairs (a, b). Pair i is columns (i, i + rotary_dim / 2),
// or (2i, 2i + 1) with `interleaved`. The other columns are copied bit for bit.
//   angles : pair i has cos_a, sin_a, cos_b, sin_b. Rows of cos and sin that are rotary_dim wide hold one angle per
//            column: cos_a belongs to column a, cos_b to column b. Rows of rotary_dim / 2 hold one angle per pair:
//            cos_a = cos_b = cos[i], sin_a = sin_b = sin[i].
//   row    : a token uses row position_ids[token] of the tables, or row `token` without position_ids. With three
//            sections (multimodal RoPE), pair i belongs to section 0 where i < section_pairs[0], to 1 where
//            i < section_pairs[0] + section_pairs[1], else to 2. The pair uses row position_ids[section, token] of the
//            tables, or row [section, token] without position_ids.
//   y_a = round(fma(x_a, cos_a, -fl(x_b * sin_a)))          y_b = round(fma(x_b, cos_b, fl(x_a * sin_b)))
// With round_products (intermediate="input" in Python), the result is that of x * cos + rotate_half(x) * sin computed
//   in dtype. With c_a = round(cos_a), and c_b, s_a and s_b in the same way:
//   y_a = round(fl(round(fl(x_a * c_a)) - round(fl(x_b * s_a))))
//   y_b = round(fl(round(fl(x_b * c_b)) + round(fl(x_a * s_b))))
// `round` rounds to dtype, to nearest even. For float32 `round` changes nothing, but the two forms still differ, since
// the first form uses fma.
// The transpose maps a gradient g of y to dx. It has the same formulas, with -sin_b in place of sin_a and -sin_a in
// place of sin_b:
//   dx_a = round(fma(g_a, cos_a, fl(g_b * sin_b)))          dx_b = round(fma(g_b, cos_b, -fl(g_a * sin_a)))
// If a and b have the same angle, the transpose is the rotation by the negative angle. The derivative of a rounding is
// taken as 1. cos and sin are constants.
// A head of a token has the same bits for any number of tokens and heads, any position and stride, and on every
// backend. Every NaN result is the canonical NaN, but NaNs in copied columns keep their bits.
// If an id is outside [0, max_position), the CPU throws InvalidArgument before it writes anything. A GPU takes NaN for
// the angles of the pairs that would use this id, and reads no table row for these pairs. Other tokens are not
// affected.
// The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

// A token is a pair (outer index, inner index). The fields are an array's strides along these two indices, in elements.
struct TokenStrides {
  std::int64_t outer = 0, inner = 0;
};

// The queries, or the keys.
struct RopeHeads {
  const void* x = nullptr;  // [num_tokens, num_heads, head_dim], dtype; columns contiguous
  void* y = nullptr;        // shaped as x: either x itself, with the strides of x, or memory that does not overlap x
  TokenStrides x_tokens, y_tokens;
  std::int64_t x_head_stride = 0, y_head_stride = 0;  // in elements
  std::int64_t num_heads = 0;                         // 0: this side is absent
};

// The table of cos or of sin. Columns are contiguous.
struct RopeAngles {
  const void* data = nullptr;  // [max_position, width]; without position_ids [num_sections, num_tokens, width]
  TokenStrides tokens;         // with position_ids `inner` is the stride of a position
  std::int64_t section_stride = 0;
};

struct RopeParams {
  RopeHeads q, k;
  RopeAngles cos, sin;                 // angle_dtype
  const void* position_ids = nullptr;  // [num_sections, num_tokens], id_dtype, or null
  TokenStrides id_tokens;
  std::int64_t id_section_stride = 0;
  std::int64_t max_position = 0;  // rows of the tables; unused without position_ids
  std::int64_t num_tokens = 0;
  std::int64_t inner_tokens = 1;              // token t is (t / inner_tokens, t % inner_tokens); >= 1
  std::int64_t head_dim = 0, rotary_dim = 0;  // rotary_dim is even and at most head_dim
  std::int64_t width = 0;                     // columns per row of cos and sin: rotary_dim or rotary_dim / 2
  std::int32_t section_pairs[3] = {};         // with three sections, section_pairs sum to rotary_dim / 2
  std::int32_t num_sections = 1;              // 1 or 3
  DType dtype = DType::kBFloat16;             // kBFloat16, kFloat16, kFloat32
  DType angle_dtype = DType::kFloat32;        // dtype or kFloat32
  DType id_dtype = DType::kInt64;             // kInt32, kInt64
  bool interleaved = false;
  bool round_products = false;
  bool transposed = false;
};
void rope(const RopeParams& p, Device device, Stream stream);

}  // namespace rlk
