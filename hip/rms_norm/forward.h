// The forward of rms_norm. A wave or a block reads a row twice, the second time from the cache. The kernel works for
// any width and alignment. HBM bandwidth bounds the kernel, which reads x and the residual once and writes y and the
// new residual once.
#pragma once

#include "hip/rms_norm/row.h"

namespace rlk::hip {

template <class T, int kThreads, bool kVector>
RLK_DEVICE void rms_norm_kernel(const RmsNormParams& p, std::int64_t first_block) {
  const auto at = place<kThreads>(first_block);
  const bool exists = at.row < p.num_rows;
  const std::int64_t columns = exists ? p.columns : 0, row = exists ? at.row : 0;
  const auto* x = row_at<T>(p.x, p.x_rows, row);
  // If there is no residual, the kernel does not read this pointer, so it may be any address. A null pointer would hide
  // the address space from the compiler.
  const bool adds = p.residual != nullptr;
  const auto* residual = row_at<T>(adds ? p.residual : p.x, p.residual_rows, row);
  float lane = 0.0f;
  for (std::int64_t k = at.first; k < columns; k += at.kStep) {
    Columns h = load_columns<T, kVector>(x + k, columns - k);
    if (adds) {
      const Columns more = load_columns<T, kVector>(residual + k, columns - k);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) h.v[j] = rounded<T>(add_rn(h.v[j], more.v[j]));
      store_columns<T, kVector>(row_at<T>(p.new_residual, p.new_residual_rows, row) + k, columns - k, h);
    }
#pragma unroll
    for (int j = 0; j < kVec8; ++j) lane = fma_rn(h.v[j], h.v[j], lane);
  }
  const float rstd = rms_norm_rstd(row_sum<kThreads>(lane), p.columns, p.eps);
  if (exists && p.rstd != nullptr && at.first == 0) global_pointer(p.rstd)[row] = Fp32::store(rstd);
  if (p.y == nullptr) return;
  auto* y = row_at<T>(p.y, p.y_rows, row);
  // The thread reads only columns that it wrote itself, so no barrier is needed.
  const auto* h = row_at<T>(adds ? p.new_residual : p.x, adds ? p.new_residual_rows : p.x_rows, row);
  for (std::int64_t k = at.first; k < columns; k += at.kStep) {
    Columns z = load_columns<T, kVector>(h + k, columns - k);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) z.v[j] = mul_rn(z.v[j], rstd);
    if (p.weight != nullptr) {
      const Columns w = load_weights<T, kVector>(p, k, columns - k);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) {
        if (p.round_before_weight) z.v[j] = rounded<T>(z.v[j]);
        z.v[j] = mul_rn(z.v[j], w.v[j]);
      }
    }
    store_columns<T, kVector>(y + k, columns - k, z);
  }
}

}  // namespace rlk::hip
