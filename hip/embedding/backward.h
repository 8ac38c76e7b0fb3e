// The backward of embedding after the sort: sums the gradients of each dweight row's tokens, and clears rows without
// tokens.
//
// A block is one wave, and each thread sums eight columns. The wave processes every row of the table whose first token
// is among its 16 sorted tokens, and sums it up to the row's last token. A sum that must wait for a later group of
// tokens stays in LDS, separately for each thread's columns.
#pragma once

#include "hip/common/vec8.h"
#include "hip/embedding/sort.h"

namespace rlk::hip {

template <class T, bool kVector>
RLK_DEVICE void sum_row(const EmbeddingBackwardParams& p, const EmbeddingKey* keys, std::int64_t i,
                        std::int64_t column) {
  constexpr std::int64_t kGroups = std::int64_t{1} << kEmbeddingLevels;
  const std::int64_t row = row_of(keys[i]), count = p.columns - column;
  const std::int64_t at = row * p.dweight_stride + column;
  float* waiting = reinterpret_cast<float*>(lds()) + thread_id();
  const auto slot = [&](int level, int j) -> float& { return waiting[(level * kVec8 + j) * kEmbeddingThreads]; };
  Columns total = {};
  if (p.accumulate) {
    total = load_columns<Fp32, kVector>(global_pointer(static_cast<const float*>(p.dweight)) + at, count);
  }
  EmbeddingTree tree;
  bool goes_on = true;
  while (goes_on) {
    const std::int64_t group = token_of(keys[i]) / kEmbeddingGroupTokens, block = group / kGroups;
    std::int64_t next = group;
    Columns chain = {};
    while (next == group) {
      const Columns x = load_columns<T, kVector>(row_at<T>(p.dy, p.dy_rows, token_of(keys[i])) + column, count);
#pragma unroll
      for (int j = 0; j < kVec8; ++j) chain.v[j] = add_rn(chain.v[j], x.v[j]);
      ++i;
      goes_on = i < p.num_tokens && row_of(keys[i]) == row;
      next = goes_on ? token_of(keys[i]) / kEmbeddingGroupTokens : (block + 1) * kGroups;
    }
    const std::int64_t in_block = next / kGroups == block ? next % kGroups : kGroups;
    const int level =
        tree.advance(static_cast<unsigned>(group % kGroups), static_cast<unsigned>(in_block), [&](int below) {
#pragma unroll
          for (int j = 0; j < kVec8; ++j) chain.v[j] = add_rn(slot(below, j), chain.v[j]);
        });
    if (level < kEmbeddingLevels) {
#pragma unroll
      for (int j = 0; j < kVec8; ++j) slot(level, j) = chain.v[j];
    } else {
#pragma unroll
      for (int j = 0; j < kVec8; ++j) total.v[j] = add_rn(total.v[j], chain.v[j]);
    }
  }
  if (p.dweight_dtype == DType::kFloat32) {
    store_columns<Fp32, kVector>(global_pointer(static_cast<float*>(p.dweight)) + at, count, total);
  } else {
    store_columns<T, kVector>(global_pointer(static_cast<typename T::Storage*>(p.dweight)) + at, count, total);
  }
}

template <class T, bool kVector>
RLK_DEVICE void embedding_rows_kernel(const EmbeddingBackwardParams& p, std::int64_t first_block,
                                      const EmbeddingKey* sorted, std::int64_t slices) {
  const std::int64_t block = first_block + block_id_x(), first = block / slices * kWindow;
  const std::int64_t column = (block % slices * kEmbeddingThreads + thread_id()) * kVec8;
  if (column >= p.columns) return;
  const auto* keys = global_pointer(sorted);
  std::int64_t before = first == 0 ? -1 : row_of(keys[first - 1]);
  for (std::int64_t i = first; i < first + kWindow && i < p.num_tokens; ++i) {
    const std::int64_t row = row_of(keys[i]);
    if (row >= p.num_rows) return;
    if (row != before) sum_row<T, kVector>(p, keys, i, column);
    before = row;
  }
}

// Each wave clears several rows one after another. If the call has no tokens, it clears every row.
template <class Unit>
RLK_DEVICE void embedding_clear_kernel(const EmbeddingBackwardParams& p, std::int64_t first_block,
                                       const EmbeddingWorkspace& w) {
  const std::int64_t first = (first_block + block_id_x()) * kClearRows;
  const std::int64_t units = p.columns * size_of(p.dweight_dtype) / static_cast<std::int64_t>(sizeof(Unit));
  for (std::int64_t row = first; row < first + kClearRows && row < p.num_rows; ++row) {
    if (p.num_tokens > 0 && global_pointer(w.present)[row] != 0) continue;
    auto* to = global_pointer(
        reinterpret_cast<Unit*>(static_cast<char*>(p.dweight) + row * p.dweight_stride * size_of(p.dweight_dtype)));
    for (std::int64_t i = thread_id(); i < units; i += kEmbeddingThreads) {
      Unit zero;
      fill(zero, 0);
      to[i] = zero;
    }
  }
}

}  // namespace rlk::hip
