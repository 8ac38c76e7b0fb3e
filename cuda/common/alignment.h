// Tests whether kernels can access arrays 16 bytes at a time, and whether TMA can read them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rlk/base.h"

namespace rlk::cuda {

inline bool at_16_bytes(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// Whether each of `num` rows begins at a multiple of 16 bytes.
inline bool rows_begin_at_16_bytes(const void* base, const RowLayout& rows, std::int64_t num, int element_bytes) {
  const auto aligned = [&](std::int64_t stride) { return stride * element_bytes % 16 == 0; };
  return at_16_bytes(base) && (std::min(num, rows.inner) <= 1 || aligned(rows.inner_stride)) &&
         (num <= rows.inner || aligned(rows.outer_stride));
}

// Whether TMA can read `num` rows as a matrix: rows must begin at multiples of 16 bytes, and have one stride that fits
// a tensor map. Expanded rows and negative strides do not fit a tensor map.
inline bool tma_reads_rows(const void* base, const RowLayout& rows, std::int64_t num, int element_bytes) {
  const bool in_range = num <= 1 || (rows.inner_stride > 0 && rows.inner_stride < std::int64_t{1} << 38);
  return rows.inner >= num && in_range && rows_begin_at_16_bytes(base, rows, num, element_bytes);
}

}  // namespace rlk::cuda
