// The rows u of an LM head with LoRA: u = round(lora_scale * x A^T), where x are the hidden states. Two calls of linear
// compute them. The first computes a float32 product, and the second scales and rounds the product.
#pragma once

#include "rlk/ops/linear_logprob.h"

namespace rlk {

inline RowLayout lora_rows_layout(const Head& head, std::int64_t num_rows) {
  return {num_rows > 0 ? num_rows : 1, 0, head.lora_rank};
}

// The first call: writes `sums` [num_rows, lora_rank] for the rows at head.hidden.
inline LinearParams lora_product(const Head& head, std::int64_t num_rows, float* sums) {
  LinearParams p;
  p.x = head.hidden;
  p.x_rows = head.hidden_rows;
  p.weight = head.lora_a;
  p.weight_stride = head.lora_a_stride;
  p.y = sums;
  p.y_rows = lora_rows_layout(head, num_rows);
  p.num_rows = num_rows;
  p.in_features = head.in_features;
  p.out_features = head.lora_rank;
  p.dtype = head.dtype;
  p.out_dtype = DType::kFloat32;
  p.arithmetic = head.arithmetic;
  return p;
}

// The second call: writes `rounded` [num_rows, lora_rank] in dtype. If `sums` was computed from hidden states, the
// result is u. If `sums` was computed from gradients, the result is v.
inline TreeSumParams lora_rounding(const Head& head, std::int64_t num_rows, const float* sums, void* rounded) {
  TreeSumParams p;
  p.parts[0] = sums;
  p.sum = rounded;
  p.scale = head.lora_scale;
  p.size = num_rows * head.lora_rank;
  p.out_dtype = head.dtype;
  return p;
}

}  // namespace rlk
