// A view of an array that the view does not own. Bindings pass it to checks, and C++ callers may build a view.
#pragma once

#include <cstdint>
#include <optional>

#include "rlk/base.h"

namespace rlk {

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  std::int32_t ndim = 0;
  const std::int64_t* shape = nullptr;    // [ndim]
  const std::int64_t* strides = nullptr;  // [ndim] in elements; null: contiguous, row-major
  bool read_only = false;

  std::int64_t num_elements() const {
    std::int64_t n = 1;
    for (std::int32_t i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
  std::int64_t stride(std::int32_t i) const {
    if (strides) return strides[i];
    std::int64_t s = 1;
    for (std::int32_t j = ndim - 1; j > i; --j) s *= shape[j];
    return s;
  }
  bool is_contiguous() const;
};

// Layout of the rows that the first `dims` dimensions span, or nullopt if they do not collapse to two strides.
std::optional<RowLayout> row_layout(const TensorView& view, std::int32_t dims);

// Whether two elements of the view share memory. An output must not have such elements.
bool overlaps_itself(const TensorView& view);

// Whether two views share a byte of memory, judged by their address ranges.
bool ranges_overlap(const TensorView& a, const TensorView& b);

}  // namespace rlk
