// The plans of each elementwise kernel. All plans give the same bits. elementwise.cpp checks the arguments.
#pragma once

#include "../common/alignment.h"
#include "../common/kernels.h"
#include "kernels/rows/elementwise.h"

namespace rlk::cuda {

// The plans: vec8s (eight adjacent columns) per thread, or 0 for eight single columns, for any width and alignment.
constexpr int kElementwiseVec8s[] = {1, 2, 0};

// Whether every row of the given arrays begins at a multiple of 16 bytes.
template <class Params, class... Array>
bool has_vectors(const Params& p, Arrays<Array...>) {
  return (... && (p.*Array::kData == nullptr ||
                  rows_begin_at_16_bytes(p.*Array::kData, p.*Array::kRows, p.num_rows, size_of(p.dtype))));
}
template <class Params>
bool serves(int vec8s, const Params& p) {
  return vec8s == 0 || (p.columns % 8 == 0 && has_vectors(p, typename Elementwise<Params>::Inputs{}) &&
                        has_vectors(p, typename Elementwise<Params>::Outputs{}));
}
// Whether the rows of each given array form one long row without gaps, and an int can count that row's columns.
template <class Params, class... Array>
bool is_contiguous(const Params& p, Arrays<Array...>) {
  return (... && (p.*Array::kData == nullptr || p.num_rows == 1 ||
                  ((p.*Array::kRows).inner >= p.num_rows && (p.*Array::kRows).inner_stride == p.columns)));
}
template <class Params>
bool is_one_row(const Params& p) {
  constexpr std::int64_t kMostColumns = std::int64_t{1} << 30;
  return p.num_rows * p.columns <= kMostColumns && is_contiguous(p, typename Elementwise<Params>::Inputs{}) &&
         is_contiguous(p, typename Elementwise<Params>::Outputs{});
}
template <class Params>
int choose_vec8s(const Params& p, int multiprocessors) {
  constexpr std::int64_t kFewThreads =
      1024;  // threads per multiprocessor; below that, more threads are faster than more loads per thread
  if (!serves(1, p)) return 0;
  if (p.dtype == DType::kFloat32) return 1;  // a vec8 of float32 has two 16-byte loads
  return p.num_rows * (p.columns / 8) >= 2 * kFewThreads * multiprocessors ? 2 : 1;
}

}  // namespace rlk::cuda
