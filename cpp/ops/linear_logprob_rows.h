// Functions that forward and backward of `linear_logprob` share, for scored rows and for logits in memory. A row is
// scored if its target is not ignore_index.
#pragma once

#include <cstdint>

#include "cpp/ops/workspace.h"
#include "kernels/vocabulary/scored_groups.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk {

constexpr std::int64_t kRowsOfLogits = 1024;  // rows held in float32 at a time if gradients or logits have 16 bits

// Copies rows [row, row + rows) of the hidden states to contiguous memory; a row that is not scored becomes zeros. With
// `groups`, the groups that have a scored row come first and zeros fill the remaining rows.
void copy_scored(const LogprobInput& p, const Head& head, std::int64_t row, std::int64_t rows,
                 const ScoredGroups* groups, void* to, Device device, Stream stream);
// The reverse: scatters contiguous rows of gradients (with `groups` as above) to rows [row, row + rows) of `to`. `to`
// begins with row `row` and has stride `to_stride`. Rows that are not scored get zeros. `from` may be `to`.
void return_scored(const LogprobInput& p, std::int64_t row, std::int64_t rows, const ScoredGroups* groups,
                   const void* from, void* to, std::int64_t to_stride, std::int64_t columns, DType dtype, Device device,
                   Stream stream);

// Rows [row, row + rows) of the logprob inputs that have one element per row.
template <class Params>
void move_to_rows(Params* p, std::int64_t row, std::int64_t rows) {
  p->target = at(p->target, row * p->target_rows.inner_stride * size_of(p->target_dtype));
  p->target_rows.inner = rows;
  p->temperature = from_row(p->temperature, row);
  p->kept_offsets = from_row(p->kept_offsets, row);
  p->num_rows = rows;
}

inline bool has_lora(const Head& head) { return head.lora_rank > 0; }

// LoRA's part of a workspace for some rows: u (hidden times lora_a, scaled), and the float32 sums that u is rounded
// from.
struct LoraRows {
  float* sums = nullptr;
  void* u = nullptr;
  void take(Pieces* pieces, const Head& head, std::int64_t rows);
  // Computes u for contiguous rows of `hidden`.
  void compute(Head head, const void* hidden, std::int64_t rows, Device device, Stream stream) const;
};

// Whether logits are float32 sums that are then rounded to another type.
inline bool sums_logits(const Head& head, DType logits_dtype) {
  return has_lora(head) && logits_dtype != DType::kFloat32;
}

// Computes logits [rows, columns], with `stride` between rows, from rows of `hidden` and columns [first, first +
// columns) of the vocabulary. With LoRA, `u` holds u of the same rows, and the product of u and lora_b is added. If
// sums_logits() is true, the logits are first summed in `sums`, which is contiguous.
void compute_logits(const Head& head, DType logits_dtype, const void* hidden, const void* u, std::int64_t rows,
                    std::int64_t first, std::int64_t columns, float* sums, void* to, std::int64_t stride, Device device,
                    Stream stream);

void round_to(const float* from, void* to, DType dtype, std::int64_t size, Device device, Stream stream);

}  // namespace rlk
