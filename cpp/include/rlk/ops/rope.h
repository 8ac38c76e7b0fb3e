// THE CONTRACT of rope: rotary position embedding of queries and keys, and its transpose, which is its gradient.
// Rules are those of docs/numerics.md. Written formulas are fp32 with the roundings shown, in the order shown.
//
// A head of head_dim columns has rotary_dim / 2 pairs (a, b) of its first rotary_dim columns: pair i is columns
// (i, i + rotary_dim / 2), or (2i, 2i + 1) with `interleaved`. The other columns are copied bit for bit.
//   angles : pair i has cos_a, sin_a, cos_b, sin_b. Rows of cos and sin that are rotary_dim wide hold one for each column:
//            cos_a is that of column a, cos_b that of column b. Rows of rotary_dim / 2 hold one for each pair:
//            cos_a = cos_b = cos[i], sin_a = sin_b = sin[i].
//   row    : of a token, row position_ids[token] of the tables, or without position_ids row `token`. With three sections
//            (multimodal RoPE) pair i belongs to section 0 where i < section_pairs[0], to 1 where i < section_pairs[0] +
//            section_pairs[1], else to 2, and takes its row from position_ids[section, token], or row [section, token].
//   y_a = round(fma(x_a, cos_a, -fl(x_b * sin_a)))          y_b = round(fma(x_b, cos_b, fl(x_a * sin_b)))
// With round_products ("input": what x * cos + rotate_half(x) * sin gives in dtype), c_a = round(cos_a), ... :
//   y_a = round(fl(round(fl(x_a * c_a)) - round(fl(x_b * s_a))))
//   y_b = round(fl(round(fl(x_b * c_b)) + round(fl(x_a * s_b))))
// `round` is to dtype, nearest even; of float32 it is nothing, and the two forms still differ by the fma.
// Transposed, from gradients g of y: the same formulas with -sin_b for sin_a and -sin_a for sin_b, so that
//   dx_a = round(fma(g_a, cos_a, fl(g_b * sin_b)))          dx_b = round(fma(g_b, cos_b, -fl(g_a * sin_a)))
// which for equal angles is the rotation by the negative angle. A rounding has the derivative 1. cos and sin are constants.
// A head of a token has the same bits for any number of tokens and heads, any position and stride, and on every backend.
// NaN results are canonical; copied columns keep theirs.
// An id outside of [0, max_position): the CPU throws InvalidArgument before it writes anything. A GPU takes NaN for the
// angles of the pairs that would have used it, reads nothing, and leaves other tokens alone.
// Enqueues on `stream`; neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

// Tokens are an outer times an inner index; what an array steps for each, in elements.
struct TokenStrides {
  std::int64_t outer = 0, inner = 0;
};

// The queries, or the keys.
struct RopeHeads {
  const void* x = nullptr;  // [num_tokens, num_heads, head_dim], dtype; columns contiguous
  void* y = nullptr;        // the same; memory apart from x, or x itself with its strides
  TokenStrides x_tokens, y_tokens;
  std::int64_t x_head_stride = 0, y_head_stride = 0;  // elements
  std::int64_t num_heads = 0;                         // 0: there are none
};

// cos or sin. Columns are contiguous.
struct RopeAngles {
  const void* data = nullptr;  // [max_position, width], or without position_ids [num_sections, num_tokens, width]
  TokenStrides tokens;         // with position_ids `inner` is the step of a position
  std::int64_t section_stride = 0;
};

struct RopeParams {
  RopeHeads q, k;
  RopeAngles cos, sin;                 // angle_dtype
  const void* position_ids = nullptr;  // [num_sections, num_tokens], id_dtype, or null
  TokenStrides id_tokens;
  std::int64_t id_section_stride = 0;
  std::int64_t max_position = 0;  // rows of the tables; without position_ids unused
  std::int64_t num_tokens = 0;
  std::int64_t inner_tokens = 1;              // token t is (t / inner_tokens, t % inner_tokens); >= 1
  std::int64_t head_dim = 0, rotary_dim = 0;  // rotary_dim is even, at most head_dim
  std::int64_t width = 0;                     // columns per row of cos and sin: rotary_dim or rotary_dim / 2
  std::int32_t section_pairs[3] = {};         // sum to rotary_dim / 2 where there are three sections
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
