// Rows of arrays by address, and the number of rows that a thread takes at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rlk/base.h"

namespace rlk::cpu {

inline const unsigned char* row_at(const void* data, const RowLayout& rows, std::int64_t row, DType t) {
  return data == nullptr ? nullptr : static_cast<const unsigned char*>(data) + rows.offset(row) * size_of(t);
}
inline unsigned char* row_at(void* data, const RowLayout& rows, std::int64_t row, DType t) {
  return data == nullptr ? nullptr : static_cast<unsigned char*>(data) + rows.offset(row) * size_of(t);
}

constexpr std::int64_t kTaskElements = 16384;  // a smaller task would save less time than waking a thread costs
inline std::int64_t rows_of_a_task(std::int64_t columns) {
  return std::max<std::int64_t>(kTaskElements / (columns + 1), 1);
}

}  // namespace rlk::cpu
