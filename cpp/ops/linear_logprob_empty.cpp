// The backward of `linear_logprob` without anything to sum: no rows, or a head without columns.
#include <algorithm>

#include "cpp/ops/linear_logprob_gradients.h"
#include "cpp/ops/linear_logprob_rows.h"

namespace rlk {

void dhidden_of_no_columns(const LinearLogprobBackwardParams& p, Device device, Stream stream) {
  LinearInputGradParams q;  // an empty sum
  q.dy_rows = dense(std::max<std::int64_t>(p.num_rows, 1), 0);
  q.weight_stride = p.head.in_features;
  q.dx = p.dhidden;
  q.dx_rows = p.dhidden_rows;
  q.dx_dtype = p.wide_dhidden ? DType::kFloat32 : p.head.dtype;
  q.num_rows = p.num_rows;
  q.in_features = p.head.in_features;
  q.dtype = p.head.dtype;
  q.arithmetic = p.head.arithmetic;
  linear_input_grad(q, device, stream);
}

void gradients_of_empty(const LinearLogprobBackwardParams& p, Device device, Stream stream) {
  const auto zeros = [&](void* dweight, DType dtype, std::int64_t rows, std::int64_t columns) {
    LinearWeightGradParams q;
    q.dweight = dweight;
    q.dweight_stride = q.in_features = columns;
    q.out_features = rows;
    q.dtype = p.head.dtype;
    q.dweight_dtype = dtype;
    q.arithmetic = p.head.arithmetic;
    if (dweight != nullptr) linear_weight_grad(q, device, stream);
  };
  const Head& head = p.head;
  if (p.dhidden != nullptr && p.num_rows > 0) dhidden_of_no_columns(p, device, stream);
  if (!p.adds_dlora_a) {
    zeros(p.dlora_a, p.wide_dlora_a ? DType::kFloat32 : head.dtype, head.lora_rank, head.in_features);
  }
  zeros(p.dlora_b, head.dtype, p.num_columns, head.lora_rank);
  if (p.dweight != nullptr) {
    LinearWeightGradParams q;
    q.main_grad = p.main_grad;
    q.main_grad_stride = p.main_grad_stride;
    q.dweight = p.dweight;
    q.dweight_stride = p.dweight_stride;
    q.in_features = p.head.in_features;
    q.out_features = p.num_columns;
    q.dtype = p.head.dtype;
    q.dweight_dtype = p.dweight_dtype;
    q.arithmetic = p.head.arithmetic;
    linear_weight_grad(q, device, stream);
  }
  if (p.dbias != nullptr) {
    LinearBiasGradParams q;
    q.dbias = p.dbias;
    q.out_features = p.num_columns;
    q.dtype = p.head.dtype;
    q.dbias_dtype = p.dbias_dtype;
    linear_bias_grad(q, device, stream);
  }
}

}  // namespace rlk
