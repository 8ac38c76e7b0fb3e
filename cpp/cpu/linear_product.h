// Matrix products in linear's orders of summation: blocks of outputs on threads, packed panels of the contraction index.
#pragma once

#include <cstdint>
#include <functional>

#include "linear_simd.h"
#include "rlk/base.h"

namespace rlk::cpu {

const LinearLanes& linear_simd();  // the lanes of the instruction set in use

// Element (i, k) lies at rows.offset(i) + k, or at rows.offset(k) + i if `rows_contracted`: rows then run along the
// contraction index.
struct LinearOperand {
  const unsigned char* data;
  RowLayout rows;
  bool rows_contracted;
};

// Outputs [a_size, b_size]. The contraction index is cut into segments, each a dot product of its own.
struct LinearProduct {
  LinearUnit unit;
  LinearOperand a, b;
  std::int64_t a_size, b_size, contraction, segment;
  bool tree;  // combine segments, a power of two, by rule 2; else by ascending additions
  // What the first segment is added to, without a tree, or, of a single segment that `continues`, begins with: written to
  // sums[0, count). May be empty.
  std::function<void(std::int64_t i, std::int64_t first, std::int64_t count, float* sums)> load;
  std::function<void(std::int64_t i, std::int64_t first, std::int64_t count, const float* sums)> store;
  bool continues = false;
};

void linear_product(const LinearProduct& p);

}  // namespace rlk::cpu
