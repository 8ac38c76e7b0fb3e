// The backward of rms_norm in three kernels. The kernels compute dx by rows, sums of dweight over groups of 64 rows,
// and the total of these sums. HBM bandwidth bounds the kernels, which read dy and h twice and write dx once.
#pragma once

#include "hip/linear/tree.h"
#include "hip/rms_norm/row.h"

namespace rlk::hip {

template <class T, int kThreads, bool kVector>
RLK_DEVICE void rms_norm_dx_kernel(const RmsNormBackwardParams& p, std::int64_t first_block) {
  const auto at = place<kThreads>(first_block);
  const bool exists = at.row < p.num_rows;
  const std::int64_t columns = exists ? p.columns : 0, row = exists ? at.row : 0;
  const auto* dy = row_at<T>(p.dy, p.dy_rows, row);
  const auto* h = row_at<T>(p.h, p.h_rows, row);
  const bool adds = p.d_new_residual != nullptr;
  const auto* third = row_at<T>(adds ? p.d_new_residual : p.dy, p.d_new_residual_rows, row);
  auto* dx = row_at<T>(p.dx, p.dx_rows, row);
  const float rstd = global_pointer(p.rstd)[row];
  float lane = 0.0f;
  for (std::int64_t k = at.first; k < columns; k += at.kStep) {
    const std::int64_t count = columns - k;
    const Columns g = load_columns<T, kVector>(dy + k, count), x = load_columns<T, kVector>(h + k, count);
    const Columns w = load_weights<T, kVector>(p, k, count);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      if (kVector || j < count) lane = fma_rn(mul_rn(g.v[j], w.v[j]), mul_rn(x.v[j], rstd), lane);
    }
  }
  const float c = div_rn(row_sum<kThreads>(lane), static_cast<float>(p.columns));
  for (std::int64_t k = at.first; k < columns; k += at.kStep) {
    const std::int64_t count = columns - k;
    const Columns g = load_columns<T, kVector>(dy + k, count), x = load_columns<T, kVector>(h + k, count);
    const Columns w = load_weights<T, kVector>(p, k, count);
    Columns d = {};
    if (adds) d = load_columns<T, kVector>(third + k, count);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      d.v[j] = rms_norm_dx(mul_rn(g.v[j], w.v[j]), mul_rn(x.v[j], rstd), c, rstd, d.v[j]);
    }
    store_columns<T, kVector>(dx + k, count, d);
  }
}

// A block sums kNormThreads * 8 columns over the rows of one group, and each thread sums eight columns (a vec8). Each
// group has `column_blocks` blocks.
template <class T, bool kVector>
RLK_DEVICE void rms_norm_chains_kernel(const RmsNormBackwardParams& p, std::int64_t first_block,
                                       std::int64_t column_blocks) {
  const std::int64_t block = first_block + block_id_x(), group = block / column_blocks;
  const std::int64_t column = (block % column_blocks * kNormThreads + thread_id()) * kVec8;
  if (column >= p.columns) return;
  const std::int64_t first = group * kRmsNormGroupRows, left = p.num_rows - first, count = p.columns - column;
  const int rows = left < kRmsNormGroupRows ? static_cast<int>(left) : kRmsNormGroupRows;
  Columns sums = {};
  for (int i = 0; i < rows; ++i) {
    const std::int64_t row = first + i;
    const Columns dy = load_columns<T, kVector>(row_at<T>(p.dy, p.dy_rows, row) + column, count);
    const Columns h = load_columns<T, kVector>(row_at<T>(p.h, p.h_rows, row) + column, count);
    const float rstd = global_pointer(p.rstd)[row];
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      float z = mul_rn(h.v[j], rstd);
      if (p.round_before_weight) z = rounded<T>(z);
      sums.v[j] = fma_rn(dy.v[j], z, sums.v[j]);
    }
  }
  auto* to = global_pointer(static_cast<float*>(p.workspace)) + group * p.columns + column;
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    if (j < count) to[j] = sums.v[j];
  }
}

// Each thread sums one column. The thread adds the groups of each block of 8192 rows as a tree, and then adds one block
// of rows after another.
template <class T>
RLK_DEVICE void rms_norm_fold_kernel(const RmsNormBackwardParams& p, std::int64_t first_block) {
  constexpr int kLevels = 7;
  static_assert(1 << kLevels == kNormGroups);
  const std::int64_t column = (first_block + block_id_x()) * kNormThreads + thread_id();
  if (column >= p.columns) return;
  const std::int64_t groups = rms_norm_groups(p.num_rows);
  const auto* sums = global_pointer(static_cast<const float*>(p.workspace)) + column;
  bool is_first = p.main_grad == nullptr;
  float total = is_first ? 0.0f : global_pointer(p.main_grad)[column];
  for (std::int64_t begin = 0; begin < groups; begin += kNormGroups) {
    TreeSum<float, kLevels> tree;
    float sum = 0.0f;
    for (int i = 0; i < kNormGroups; ++i) {
      sum = begin + i < groups ? sums[(begin + i) * p.columns] : 0.0f;
      tree.take(i, sum);
    }
    total = is_first ? sum : add_rn(total, sum);
    is_first = false;
  }
  if (p.dweight_dtype == DType::kFloat32) {
    global_pointer(static_cast<float*>(p.dweight))[column] = Fp32::store(total);
  } else {
    global_pointer(static_cast<typename T::Storage*>(p.dweight))[column] = T::store(total);
  }
}

}  // namespace rlk::hip
