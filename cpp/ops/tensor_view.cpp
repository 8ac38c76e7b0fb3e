#include "rlk/tensor_view.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace rlk {

bool TensorView::is_contiguous() const {
  std::int64_t expected = 1;
  for (std::int32_t i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride(i) != expected) return num_elements() == 0;
    expected *= shape[i];
  }
  return true;
}

std::optional<RowLayout> row_layout(const TensorView& view, std::int32_t dims) {
  // Pairs (size, stride) from the innermost row dimension outwards. Two neighbouring dimensions merge if one continues
  // the other.
  std::pair<std::int64_t, std::int64_t> merged[2] = {{1, 0}, {1, 0}};
  int levels = 0;
  for (std::int32_t i = dims - 1; i >= 0; --i) {
    const std::int64_t size = view.shape[i], stride = view.stride(i);
    if (size == 0) return RowLayout{};
    if (size == 1) continue;
    if (levels > 0 && stride == merged[levels - 1].first * merged[levels - 1].second) {
      merged[levels - 1].first *= size;
    } else if (levels < 2) {
      merged[levels++] = {size, stride};
    } else {
      return std::nullopt;
    }
  }
  return RowLayout{.inner = merged[0].first, .outer_stride = merged[1].second, .inner_stride = merged[0].second};
}

bool overlaps_itself(const TensorView& view) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // (|stride|, size)
  for (std::int32_t i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 0) return false;
    if (view.shape[i] > 1) dims.emplace_back(std::abs(view.stride(i)), view.shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;  // largest offset in the dimensions visited so far
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

bool ranges_overlap(const TensorView& a, const TensorView& b) {
  const auto range = [](const TensorView& v) {
    std::int64_t low = 0, high = 0;
    for (std::int32_t i = 0; i < v.ndim; ++i) {
      const std::int64_t step = v.stride(i) * (v.shape[i] - 1);
      (step < 0 ? low : high) += step;
    }
    const auto base = reinterpret_cast<std::intptr_t>(v.data);
    return std::pair{base + low * size_of(v.dtype), base + (high + 1) * size_of(v.dtype)};
  };
  if (a.num_elements() == 0 || b.num_elements() == 0 || !(a.device == b.device)) return false;
  const auto [a_low, a_high] = range(a);
  const auto [b_low, b_high] = range(b);
  return a_low < b_high && b_low < a_high;
}

}  // namespace rlk
