// The sums of linear that are not products: dbias over rows, and the sum over the arrays of tensor-parallel ranks as a
// tree. HBM bandwidth bounds the kernels, which read each addend once.
#pragma once

#include "hip/common/element.h"
#include "hip/common/wave.h"
#include "hip/linear/any_element.h"
#include "hip/linear/launches.h"
#include "hip/linear/tree.h"

namespace rlk::hip {

// A block sums kBiasColumns columns. The rows of a column are summed by a tree within each block of 8192 rows. One
// thread sums one slice of such a tree, which is a subtree.
template <class T>
RLK_DEVICE void bias_grad_kernel(const LinearBiasGradParams& p, std::int64_t first_block) {
  using Storage = typename T::Storage;
  constexpr int kSliceGroups = kBiasGroups / kBiasSlices;
  static_assert(kSliceGroups == 16 && kBiasSlices == 8);
  const int slice = thread_id() / kBiasColumns, local = thread_id() % kBiasColumns;
  const std::int64_t column = (first_block + block_id_x()) * kBiasColumns + local;
  const bool exists = column < p.out_features;
  const Storage* dy = global_pointer(static_cast<const Storage*>(p.dy)) + (exists ? column : 0);
  auto* slices = reinterpret_cast<float*>(lds());
  float total = 0.0f;
  for (std::int64_t block = 0; block < p.num_rows; block += kTokenBlock) {
    const auto group = [&](int g) {
      const std::int64_t first = block + g * kBiasGroupRows, left = p.num_rows - first;
      const int rows = !exists || left <= 0 ? 0 : left < kBiasGroupRows ? static_cast<int>(left) : kBiasGroupRows;
      float sum = 0.0f;
      for (int i = 0; i < rows; ++i) sum = add_rn(sum, T::load(dy[p.dy_rows.offset(first + i)]));
      return sum;
    };
    TreeSum<float, 4> of_slice;
    float sum = 0.0f;
    for (int g = 0; g < kSliceGroups; ++g) {
      sum = group(slice * kSliceGroups + g);
      of_slice.take(g, sum);
    }
    slices[thread_id()] = sum;
    block_barrier();
    if (slice == 0) {
      TreeSum<float, 3> of_block;
      for (int s = 0; s < kBiasSlices; ++s) {
        sum = slices[s * kBiasColumns + local];
        of_block.take(s, sum);
      }
      total = block == 0 ? sum : add_rn(total, sum);
    }
    block_barrier();
  }
  if (slice != 0 || !exists) return;
  if (p.dbias_dtype == DType::kFloat32) {
    static_cast<float*>(p.dbias)[column] = Fp32::store(total);
  } else {
    static_cast<Storage*>(p.dbias)[column] = T::store(total);
  }
}

// Computes i % columns. The function avoids the slow 64-bit division if both numbers fit 32 bits.
RLK_DEVICE std::int64_t column_of(std::int64_t i, std::int64_t columns) {
  if ((i | columns) >> 32 != 0) return i % columns;
  return static_cast<std::uint32_t>(i) % static_cast<std::uint32_t>(columns);
}

template <class T>
RLK_DEVICE void tree_sum_kernel(const TreeSumParams& p, std::int64_t first_block) {
  const std::int64_t first = (first_block + block_id_x()) * kTreeThreads * kTreeElements + thread_id();
#pragma unroll
  for (int j = 0; j < kTreeElements; ++j) {
    const std::int64_t i = first + j * kTreeThreads;
    if (i >= p.size) return;
    TreeSum<float, 3> tree;
    float sum = 0.0f;
    for (int part = 0; part < p.count; ++part) {
      sum = global_pointer(p.parts[part])[i];
      tree.take(part, sum);
    }
    if (p.scale != 1.0f) sum = mul_rn(sum, p.scale);
    if (p.bias) sum = add_rn(sum, load_element(p.bias, p.bias_dtype, column_of(i, p.columns)));
    static_cast<typename T::Storage*>(p.sum)[i] = T::store(sum);
  }
}

}  // namespace rlk::hip
