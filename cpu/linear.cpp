// CPU backend of the operator `linear`: maps each function to a product, and sums the bias gradient over tokens.
#include "rlk/ops/linear.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "float_environment.h"
#include "kernels/rows/linear_check.h"
#include "linear_product.h"
#include "linear_simd.h"
#include "rlk/backends.h"
#include "rlk/math/ieee.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kBiasColumns = 128;     // columns per task: four cache lines of a row
constexpr std::int64_t kBiasElements = 65536;  // a smaller task would save less time than waking a thread costs
constexpr std::int64_t kTreeElements = 32768;
constexpr std::int64_t kTreeColumns = 1024;  // columns that tree_sum() takes at a time; their sums stay in L1
constexpr int kBiasGroups = kTokenBlock / kBiasGroupRows;

const unsigned char* bytes_of(const void* p) { return static_cast<const unsigned char*>(p); }
unsigned char* bytes_of(void* p) { return static_cast<unsigned char*>(p); }

RowLayout matrix_rows(std::int64_t stride) { return {std::numeric_limits<std::int64_t>::max(), 0, stride}; }

LinearOperand by_rows(const void* data, const RowLayout& rows) { return {bytes_of(data), rows, false}; }
LinearOperand by_columns(const void* data, const RowLayout& rows) { return {bytes_of(data), rows, true}; }

void continue_from(const float* start, std::int64_t stride, LinearProduct* product) {
  if (start == nullptr) return;
  product->continues = true;
  product->load = [=](std::int64_t row, std::int64_t first, std::int64_t count, float* sums) {
    std::memcpy(sums, start + row * stride + first, static_cast<std::size_t>(count) * sizeof(float));
  };
}

// Computes dbias of columns [first, first + count): the groups of a block, their tree, and the fold over blocks.
void bias_columns(const LinearBiasGradParams& p, std::int64_t first, std::int64_t count) {
  std::vector<float> groups(static_cast<std::size_t>(kBiasGroups * count)), sums(static_cast<std::size_t>(count), 0.0f);
  const unsigned char* rows[kBiasGroupRows];
  for (std::int64_t block = 0; block < p.num_rows; block += kTokenBlock) {
    std::fill(groups.begin(), groups.end(), 0.0f);
    for (int g = 0; g < kBiasGroups; ++g) {
      const std::int64_t begin = block + g * kBiasGroupRows,
                         num = std::min<std::int64_t>(kBiasGroupRows, p.num_rows - begin);
      if (num <= 0) break;
      for (std::int64_t r = 0; r < num; ++r) {
        rows[r] = bytes_of(p.dy) + (p.dy_rows.offset(begin + r) + first) * size_of(p.dtype);
      }
      linear_simd().add_rows({rows, num, count, p.dtype}, &groups[static_cast<std::size_t>(g * count)]);
    }
    for (int n = kBiasGroups; n > 1; n /= 2) {
      for (int g = 0; g < n / 2; ++g) {
        float* to = &groups[static_cast<std::size_t>(g * count)];
        const float* from = &groups[static_cast<std::size_t>(2 * g * count)];
        for (std::int64_t j = 0; j < count; ++j) to[j] = add_rn(from[j], from[count + j]);
      }
    }
    for (std::int64_t j = 0; j < count; ++j) {
      const float sum = groups[static_cast<std::size_t>(j)];
      sums[static_cast<std::size_t>(j)] = block == 0 ? sum : add_rn(sums[static_cast<std::size_t>(j)], sum);
    }
  }
  linear_simd().store(sums.data(), count, nullptr, DType::kFloat32, bytes_of(p.dbias) + first * size_of(p.dbias_dtype),
                      p.dbias_dtype);
}

}  // namespace

void linear(const LinearParams& p) {
  check_linear(p);
  LinearProduct product = {{p.arithmetic, p.dtype},
                           by_rows(p.x, p.x_rows),
                           by_rows(p.weight, matrix_rows(p.weight_stride)),
                           p.num_rows,
                           p.out_features,
                           p.in_features,
                           std::max<std::int64_t>(p.in_features / p.k_segments, 1),
                           true,
                           {},
                           {}};
  continue_from(p.start, p.start_stride, &product);
  product.store = [&](std::int64_t row, std::int64_t first, std::int64_t count, const float* sums) {
    const void* bias = p.bias == nullptr ? nullptr : bytes_of(p.bias) + first * size_of(p.bias_dtype);
    unsigned char* y = bytes_of(p.y) + (p.y_rows.offset(row) + first) * size_of(p.out_dtype);
    linear_simd().store(sums, count, bias, p.bias_dtype, y, p.out_dtype);
  };
  linear_product(product);
}

void linear_input_grad(const LinearInputGradParams& p) {
  check_linear_input_grad(p);
  LinearProduct product = {{p.arithmetic, p.dtype},
                           by_rows(p.dy, p.dy_rows),
                           by_columns(p.weight, matrix_rows(p.weight_stride)),
                           p.num_rows,
                           p.in_features,
                           p.out_features,
                           std::max<std::int64_t>(p.out_features, 1),
                           true,
                           {},
                           {}};
  continue_from(p.start, p.start_stride, &product);
  product.store = [&](std::int64_t row, std::int64_t first, std::int64_t count, const float* sums) {
    unsigned char* dx = bytes_of(p.dx) + (p.dx_rows.offset(row) + first) * size_of(p.dx_dtype);
    linear_simd().store(sums, count, nullptr, p.dtype, dx, p.dx_dtype);
  };
  linear_product(product);
}

void linear_weight_grad(const LinearWeightGradParams& p) {
  check_linear_weight_grad(p);
  LinearProduct product = {{p.arithmetic, p.dtype},
                           by_columns(p.dy, p.dy_rows),
                           by_columns(p.x, p.x_rows),
                           p.out_features,
                           p.in_features,
                           p.num_rows,
                           kTokenBlock,
                           false,
                           {},
                           {}};
  if (p.main_grad != nullptr) {
    product.load = [&](std::int64_t row, std::int64_t first, std::int64_t count, float* sums) {
      const float* from = p.main_grad + row * p.main_grad_stride + first;
      std::memcpy(sums, from, static_cast<std::size_t>(count) * sizeof(float));
    };
  }
  product.store = [&](std::int64_t row, std::int64_t first, std::int64_t count, const float* sums) {
    unsigned char* dweight = bytes_of(p.dweight) + (row * p.dweight_stride + first) * size_of(p.dweight_dtype);
    linear_simd().store(sums, count, nullptr, p.dtype, dweight, p.dweight_dtype);
  };
  linear_product(product);
}

void linear_bias_grad(const LinearBiasGradParams& p) {
  check_linear_bias_grad(p);
  const std::int64_t tasks = (p.out_features + kBiasColumns - 1) / kBiasColumns;
  const std::int64_t grain = std::max<std::int64_t>(kBiasElements / (kBiasColumns * (p.num_rows + 1)), 1);
  parallel_for(tasks, grain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t first = task * kBiasColumns;
      bias_columns(p, first, std::min(kBiasColumns, p.out_features - first));
    }
  });
}

void tree_sum(const TreeSumParams& p) {
  check_tree_sum(p);
  parallel_for(p.size, kTreeElements, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    const float* parts[kMaxSegments] = {};
    const auto parts_from = [&](std::int64_t first) {
      for (int i = 0; i < p.count; ++i) parts[i] = p.parts[i] + first;
      return parts;
    };
    unsigned char* sum = bytes_of(p.sum);
    if (p.bias == nullptr) {
      return linear_simd().add_parts(parts_from(begin), p.count, p.scale, end - begin,
                                     sum + begin * size_of(p.out_dtype), p.out_dtype);
    }
    float tree[kTreeColumns];
    for (std::int64_t i = begin, count = 0; i < end; i += count) {  // `count` columns of one row
      const std::int64_t column = i % p.columns;
      count = std::min({end - i, p.columns - column, kTreeColumns});
      linear_simd().add_parts(parts_from(i), p.count, p.scale, count, tree, DType::kFloat32);
      linear_simd().store(tree, count, bytes_of(p.bias) + column * size_of(p.bias_dtype), p.bias_dtype,
                          sum + i * size_of(p.out_dtype), p.out_dtype);
    }
  });
}

}  // namespace rlk::cpu
