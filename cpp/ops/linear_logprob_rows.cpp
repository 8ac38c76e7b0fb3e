#include "cpp/ops/linear_logprob_rows.h"

#include "kernels/rows/lora_rows.h"
#include "kernels/vocabulary/scored_rows.h"
#include "rlk/backends.h"

namespace rlk {
namespace {

ScoredRowsParams scored_rows_of(const LogprobInput& p, std::int64_t row, std::int64_t rows, std::int64_t columns,
                                DType dtype) {
  ScoredRowsParams q;
  q.target = p.target;
  q.first_row = row;
  q.num_rows = rows;
  q.row_bytes = columns * size_of(dtype);
  q.target_stride = p.target_rows.inner_stride;
  q.ignore_index = p.ignore_index;
  q.element_bytes = size_of(dtype);
  q.target_dtype = p.target_dtype;
  return q;
}

}  // namespace

void copy_scored(const LogprobInput& p, const Head& head, std::int64_t row, std::int64_t rows,
                 const ScoredGroups* groups, void* to, Device device, Stream stream) {
  ScoredRowsParams q = scored_rows_of(p, row, rows, head.in_features, head.dtype);
  q.from = head.hidden;
  q.from_rows = head.hidden_rows;
  q.from_group = groups == nullptr ? nullptr : groups->group;
  q.to = to;
  q.to_stride = head.in_features;
  if (q.row_bytes > 0) scored_rows(q, device, stream);
}

void return_scored(const LogprobInput& p, std::int64_t row, std::int64_t rows, const ScoredGroups* groups,
                   const void* from, void* to, std::int64_t to_stride, std::int64_t columns, DType dtype, Device device,
                   Stream stream) {
  ScoredRowsParams q = scored_rows_of(p, row, rows, columns, dtype);
  q.back = true;
  q.from = from;
  q.from_rows = dense(rows, from == to ? to_stride : columns);
  q.from_group = groups == nullptr ? nullptr : groups->place;
  q.to = to;
  q.to_stride = to_stride;
  if (q.row_bytes > 0) scored_rows(q, device, stream);
}

void LoraRows::take(Pieces* pieces, const Head& head, std::int64_t rows) {
  if (!has_lora(head)) return;
  sums = pieces->take<float>(rows * head.lora_rank * 4);
  u = pieces->take(rows * head.lora_rank * size_of(head.dtype));
}

void LoraRows::compute(Head head, const void* hidden, std::int64_t rows, Device device, Stream stream) const {
  if (!has_lora(head)) return;
  head.hidden = hidden;
  head.hidden_rows = dense(rows, head.in_features);
  linear(lora_product(head, rows, sums), device, stream);
  tree_sum(lora_rounding(head, rows, sums, u), device, stream);
}

void compute_logits(const Head& head, DType logits_dtype, const void* hidden, const void* u, std::int64_t rows,
                    std::int64_t first, std::int64_t columns, float* sums, void* to, std::int64_t stride, Device device,
                    Stream stream) {
  LinearParams q;
  q.x = hidden;
  q.x_rows = dense(rows, head.in_features);
  q.weight = at(head.weight, first * head.weight_stride * size_of(head.dtype));
  q.weight_stride = head.weight_stride;
  if (head.bias != nullptr) q.bias = at(head.bias, first * size_of(head.bias_dtype));
  q.bias_dtype = head.bias_dtype;
  q.y = to;
  q.y_rows = dense(rows, stride);
  q.num_rows = rows;
  q.in_features = head.in_features;
  q.out_features = columns;
  q.dtype = head.dtype;
  q.out_dtype = logits_dtype;
  q.arithmetic = head.arithmetic;
  if (!has_lora(head)) return linear(q, device, stream);
  LinearParams of_hidden = q;
  of_hidden.bias = nullptr;
  of_hidden.out_dtype = DType::kFloat32;
  if (sums_logits(head, logits_dtype)) {
    of_hidden.y = sums;
    of_hidden.y_rows = dense(rows, columns);
  }
  linear(of_hidden, device, stream);
  q.start = static_cast<const float*>(of_hidden.y);
  q.start_stride = of_hidden.y_rows.inner_stride;
  q.x = u;
  q.x_rows = dense(rows, head.lora_rank);
  q.weight = at(head.lora_b, first * head.lora_b_stride * size_of(head.dtype));
  q.weight_stride = head.lora_b_stride;
  q.in_features = head.lora_rank;
  linear(q, device, stream);
}

void round_to(const float* from, void* to, DType dtype, std::int64_t size, Device device, Stream stream) {
  TreeSumParams q;
  q.parts[0] = from;
  q.sum = to;
  q.size = size;
  q.out_dtype = dtype;
  tree_sum(q, device, stream);
}

}  // namespace rlk
