// Every backend checks these preconditions of a rope call, because a violation would corrupt memory. Users' input is
// checked earlier, by the bindings.
#pragma once

#include "rlk/ops/rope.h"

namespace rlk {

inline void check_rope(const RopeParams& p) {
  const auto is_float = [](DType t) { return t == DType::kFloat32 || t == DType::kBFloat16 || t == DType::kFloat16; };
  RLK_CHECK(p.num_tokens >= 0 && p.num_tokens < std::int64_t{1} << 32, "rope: fewer than 2^32 tokens");
  RLK_CHECK(p.inner_tokens >= 1 && p.inner_tokens < std::int64_t{1} << 32, "rope: inner_tokens is in [1, 2^32)");
  RLK_CHECK(p.q.num_heads >= 0 && p.k.num_heads >= 0 && p.q.num_heads + p.k.num_heads < std::int64_t{1} << 24,
            "rope: fewer than 2^24 heads");
  RLK_CHECK(p.head_dim >= 0 && p.head_dim < std::int64_t{1} << 24, "rope: fewer than 2^24 columns");
  RLK_CHECK(p.rotary_dim >= 0 && p.rotary_dim <= p.head_dim && p.rotary_dim % 2 == 0,
            "rope: rotary_dim is even and at most head_dim");
  RLK_CHECK(p.width == p.rotary_dim || p.width == p.rotary_dim / 2, "rope: width is rotary_dim or rotary_dim / 2");
  RLK_CHECK(is_float(p.dtype), "rope: q is float32, bfloat16 or float16");
  RLK_CHECK(p.angle_dtype == p.dtype || p.angle_dtype == DType::kFloat32, "rope: cos has q's type or float32");
  RLK_CHECK(p.id_dtype == DType::kInt32 || p.id_dtype == DType::kInt64, "rope: position_ids are int32 or int64");
  RLK_CHECK(p.num_sections == 1 || p.num_sections == 3, "rope: one section or three");
  if (p.num_sections == 3) {
    const std::int64_t a = p.section_pairs[0], b = p.section_pairs[1], c = p.section_pairs[2];
    RLK_CHECK(a >= 0 && b >= 0 && c >= 0 && a + b + c == p.rotary_dim / 2, "rope: sections sum to rotary_dim / 2");
  }
  RLK_CHECK(p.max_position >= 0, "rope: max_position is not negative");
  if (p.num_tokens == 0 || p.head_dim == 0) return;
  for (const RopeHeads* heads : {&p.q, &p.k}) {
    RLK_CHECK(heads->num_heads == 0 || (heads->x && heads->y), "rope: arrays of heads are given");
  }
  const bool needs_angles = p.rotary_dim > 0 && p.q.num_heads + p.k.num_heads > 0;
  // every position id is out of range, so cos and sin are not read
  const bool empty_tables = p.position_ids != nullptr && p.max_position == 0;
  RLK_CHECK(!needs_angles || empty_tables || (p.cos.data && p.sin.data), "rope: cos and sin are given");
}

}  // namespace rlk
