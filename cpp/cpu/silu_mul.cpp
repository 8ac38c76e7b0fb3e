// CPU backend of silu_mul: how pieces of rows are spread over threads.
#include "rlk/ops/silu_mul.h"

#include <algorithm>

#include "float_environment.h"
#include "rlk/backends.h"
#include "rlk/kernels/silu_mul_check.h"
#include "rows.h"
#include "silu_mul_simd.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

const SiluMulLanes& lanes() { return RLK_CPU_LANES_IN_USE(silu_mul_simd); }

// f(&piece, at) for pieces of at most kTaskElements columns; at(array, its rows) is where the piece begins in an array.
template <class Params, class F>
void for_each_piece(const Params& p, const F& f) {
  if (p.num_rows == 0 || p.columns == 0) return;
  const std::int64_t pieces = (p.columns + kTaskElements - 1) / kTaskElements;  // pieces per row
  parallel_for(p.num_rows * pieces, pieces > 1 ? 1 : rows_of_a_task(p.columns),
               [&](std::int64_t begin, std::int64_t end) {
                 const FloatEnvironment environment;
                 for (std::int64_t i = begin; i < end; ++i) {
                   const std::int64_t first = i % pieces * kTaskElements;
                   GatedMulPiece piece = {};
                   piece.columns = std::min(kTaskElements, p.columns - first);
                   piece.dtype = p.dtype;
                   piece.activation = p.activation;
                   piece.round_before_mul = p.round_before_mul;
                   const auto at = [&](auto* data, const RowLayout& rows) {
                     auto* row = row_at(data, rows, i / pieces, p.dtype);
                     return row == nullptr ? row : row + first * size_of(p.dtype);
                   };
                   piece.gate = at(p.gate, p.gate_rows);
                   piece.up = at(p.up, p.up_rows);
                   f(&piece, at);
                 }
               });
}

}  // namespace

void gated_mul(const GatedMulParams& p) {
  check_gated_mul(p);
  for_each_piece(p, [&](GatedMulPiece* piece, const auto& at) {
    piece->y = at(p.y, p.y_rows);
    lanes().forward(*piece);
  });
}

void gated_mul_backward(const GatedMulBackwardParams& p) {
  check_gated_mul_backward(p);
  if (p.d_gate == nullptr && p.d_up == nullptr) return;
  for_each_piece(p, [&](GatedMulPiece* piece, const auto& at) {
    piece->dy = at(p.dy, p.dy_rows);
    piece->d_gate = at(p.d_gate, p.d_gate_rows);
    piece->d_up = at(p.d_up, p.d_up_rows);
    lanes().backward(*piece);
  });
}

}  // namespace rlk::cpu
