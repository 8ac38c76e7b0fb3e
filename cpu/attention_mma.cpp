#include "attention_mma.h"

#include <algorithm>
#include <cmath>

#include "linear_product.h"
#include "rlk/math/ieee.h"
#include "rlk/math/mma_model.h"

namespace rlk::cpu {

// The number of columns of a head fits one A panel (linear_simd.h) and is a multiple of the 16 indices of a step. The
// same is true of the number of keys of a block, for both block sizes.
static_assert(kColumns % kMmaStepK == 0 && kMaxColumns <= kPanelK);
static_assert(kTileKeys / 2 % kMmaStepK == 0 && kTileKeys <= kPanelK);

Arithmetic attention_products(const AttentionInput& p) {
  return p.dtype != DType::kFloat32 && p.arithmetic == Arithmetic::kSm90 ? Arithmetic::kSm90 : Arithmetic::kIeee;
}

AttentionMma::AttentionMma(LinearUnit unit, std::int64_t rows) : lanes_(linear_simd()), unit_(unit) {
  const auto panel = static_cast<std::size_t>(rows * kPanelStride);
  const auto width = static_cast<std::size_t>(lanes_.tile_columns);
  a_.resize(panel);
  a_exponents_.resize(panel);
  b_.resize(kPanelK * width);
  b_exponents_.resize(kPanelK * width / 2);
  sums_.resize(static_cast<std::size_t>(rows) * width);
}

void AttentionMma::product(int rows, int k, float* sums, std::int64_t stride) {
  lanes_.prepare_b(unit_, b_.data(), b_exponents_.data(), k);
  lanes_.multiply({unit_, a_.data(), a_exponents_.data(), b_.data(), b_exponents_.data(), sums, rows, stride, k});
}

void AttentionMma::multiply(const float* q, int rows, std::int64_t columns, const float* transposed,
                            std::int64_t head_dim, int keys, float* scores) {
  const int width = lanes_.tile_columns, k = static_cast<int>(columns);
  for (int i = 0; i < rows; ++i) std::copy_n(q + i * columns, k, a_.data() + i * kPanelStride);
  lanes_.prepare_a(unit_, a_.data(), a_exponents_.data(), rows, k);
  std::fill_n(scores, rows * kTileKeys, 0.0f);
  std::fill_n(b_.data() + head_dim * width, (k - head_dim) * width, 0.0f);
  for (int j = 0; j < keys; j += width) {
    for (std::int64_t d = 0; d < head_dim; ++d)
      std::copy_n(transposed + d * kTileKeys + j, width, b_.data() + d * width);
    product(rows, k, scores + j, kTileKeys);
  }
}

void AttentionMma::accumulate(const float* weights, const AttentionColumns* sees, int rows, int keys, const float* v,
                              std::int64_t columns, float* sums) {
  accumulate_keys(weights, sees, rows, 0, keys, v, columns, sums);
}

void AttentionMma::accumulate_seen(const float* weights, const AttentionColumns* sees, int rows, int keys,
                                   const float* v, std::int64_t columns, float* sums) {
  const bool finite = std::all_of(v, v + keys * columns, [](float x) { return std::isfinite(x); });
  const int step = finite ? keys : kMmaStepK;
  for (int begin = 0; begin < keys; begin += step) {
    accumulate_keys(weights, sees, rows, begin, begin + step, v, columns, sums);
  }
}

void AttentionMma::accumulate_keys(const float* weights, const AttentionColumns* sees, int rows, int begin, int end,
                                   const float* v, std::int64_t columns, float* sums) {
  const int width = lanes_.tile_columns, keys = end - begin;
  std::vector<int> seeing;
  for (int i = 0; i < rows; ++i) {
    if (std::max(sees[i].first, begin) < std::min(sees[i].last, end)) seeing.push_back(i);
  }
  const int count = static_cast<int>(seeing.size());
  for (int r = 0; r < count; ++r) {
    const float* from = weights + seeing[r] * kTileKeys;
    const auto [first, last] = sees[seeing[r]];
    float* to = a_.data() + r * kPanelStride;
    for (int j = begin; j < end; ++j) {
      to[j - begin] = j >= first && j < last && bits_of(from[j]) != kNothing ? from[j] : 0.0f;
    }
  }
  lanes_.prepare_a(unit_, a_.data(), a_exponents_.data(), count, keys);
  for (std::int64_t d = 0; d < columns; d += width) {
    const std::int64_t some = std::min<std::int64_t>(width, columns - d);
    if (some < width) std::fill_n(b_.data(), keys * width, 0.0f);
    for (int j = 0; j < keys; ++j) std::copy_n(v + (begin + j) * columns + d, some, b_.data() + j * width);
    for (int r = 0; r < count; ++r) std::copy_n(sums + seeing[r] * columns + d, some, sums_.data() + r * width);
    product(count, keys, sums_.data(), width);
    for (int r = 0; r < count; ++r) std::copy_n(sums_.data() + r * width, some, sums + seeing[r] * columns + d);
  }
}

}  // namespace rlk::cpu
