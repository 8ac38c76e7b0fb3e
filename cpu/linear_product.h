// Matrix products in linear's orders of summation. Blocks of outputs are spread over threads; panels of the contraction
// index are packed.
#pragma once

#include <cstdint>
#include <functional>

#include "linear_simd.h"
#include "rlk/base.h"

namespace rlk::cpu {

const LinearLanes& linear_simd();  // the lanes of the instruction set in use

// Element (i, k) lies at rows.offset(i) + k. If `rows_contracted`, it lies at rows.offset(k) + i: each row in memory
// then holds one contraction index k.
struct LinearOperand {
  const unsigned char* data;
  RowLayout rows;
  bool rows_contracted;
};

// Outputs [a_size, b_size]. The contraction index is cut into segments, each with its own dot product.
struct LinearProduct {
  LinearUnit unit;
  LinearOperand a, b;
  std::int64_t a_size, b_size, contraction, segment;
  bool tree;  // adds segments by the tree of rule 2, for a power of two of segments; otherwise in ascending order
  // Writes the initial values to sums[0, count). Without a tree, the segments are added to these values in turn. If the
  // product `continues`, the chains of its single segment start from these values. `load` may be empty.
  std::function<void(std::int64_t i, std::int64_t first, std::int64_t count, float* sums)> load;
  std::function<void(std::int64_t i, std::int64_t first, std::int64_t count, const float* sums)> store;
  bool continues = false;
};

void linear_product(const LinearProduct& p);

}  // namespace rlk::cpu
