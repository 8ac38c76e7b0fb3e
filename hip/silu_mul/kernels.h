// silu_mul and gelu_mul, forward and backward. Bound by HBM: every input is read once, every output written once.
// A thread has a vec8 of a row's columns or, where rows are no vectors, eight columns that lie apart. It has read all
// that it writes over before it writes, so outputs may be inputs.
#pragma once

#include "hip/common/vec8.h"
#include "hip/silu_mul/launches.h"
#include "rlk/kernels/silu_mul_activation.h"

namespace rlk::hip {

// Calls f(load, store) for a thread's columns of its row, up to eight a call. load(array) returns them as fp32,
// store(array, values) writes them.
template <class T, bool kVector, class Params, class F>
RLK_DEVICE void for_each_vec8(const Params& p, std::int64_t first_block, const RowSplit& split, const F& f) {
  constexpr int kCount = kVector ? kGatedVec8s : kGatedElements;
  const RowPlace at = place_in_rows(split, kCount, static_cast<std::uint32_t>(first_block + block_id_x()), thread_id());
  if (at.row >= p.num_rows) return;
  const int columns = static_cast<int>(p.columns);
  if constexpr (kVector) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = (at.first + i * at.step) * kVec8;
      if (column >= columns) continue;
      f([&](const void* base,
            const RowLayout& rows) { return load_columns<T, true>(row_at<T>(base, rows, at.row) + column, kVec8); },
        [&](void* base, const RowLayout& rows, const Columns& x) {
          store_columns<T, true>(row_at<T>(base, rows, at.row) + column, kVec8, x);
        });
    }
  } else {
    static_assert(kCount == kVec8);
    f(
        [&](const void* base, const RowLayout& rows) {
          const auto* from = row_at<T>(base, rows, at.row);
          Columns x;
#pragma unroll
          for (int j = 0; j < kVec8; ++j) {
            const int k = at.first + j * at.step;
            x.v[j] = k < columns ? T::load(from[k]) : 0.0f;
          }
          return x;
        },
        [&](void* base, const RowLayout& rows, const Columns& x) {
          auto* to = row_at<T>(base, rows, at.row);
#pragma unroll
          for (int j = 0; j < kVec8; ++j) {
            const int k = at.first + j * at.step;
            if (k < columns) to[k] = T::store(x.v[j]);
          }
        });
  }
}

template <class T, Activation kActivation, bool kVector>
RLK_DEVICE void gated_mul_kernel(const GatedMulParams& p, std::int64_t first_block, const RowSplit& split) {
  for_each_vec8<T, kVector>(p, first_block, split, [&](const auto& load, const auto& store) {
    const Columns g = load(p.gate, p.gate_rows), u = load(p.up, p.up_rows);
    Columns y;
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      float b = activated<kActivation, false>(g.v[j]).value;
      if (p.round_before_mul) b = rounded<T>(b);
      y.v[j] = mul_rn(b, u.v[j]);
    }
    store(p.y, p.y_rows, y);
  });
}

template <class T, Activation kActivation, bool kVector>
RLK_DEVICE void gated_mul_backward_kernel(const GatedMulBackwardParams& p, std::int64_t first_block,
                                          const RowSplit& split) {
  for_each_vec8<T, kVector>(p, first_block, split, [&](const auto& load, const auto& store) {
    const Columns dy = load(p.dy, p.dy_rows), g = load(p.gate, p.gate_rows), u = load(p.up, p.up_rows);
    Columns d_gate, d_up;
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      const Activated<float> a = activated<kActivation, true>(g.v[j]);
      d_gate.v[j] = mul_rn(mul_rn(dy.v[j], u.v[j]), a.slope);
      d_up.v[j] = mul_rn(dy.v[j], p.round_before_mul ? rounded<T>(a.value) : a.value);
    }
    if (p.d_gate != nullptr) store(p.d_gate, p.d_gate_rows, d_gate);
    if (p.d_up != nullptr) store(p.d_up, p.d_up_rows, d_up);
  });
}

}  // namespace rlk::hip
