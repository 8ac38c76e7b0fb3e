// Rows of hidden states as a product reads them: side by side, and zero where a row is not scored, so that what it holds
// takes part in nothing.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/load_index.h"

namespace rlk {

struct ScoredRowsParams {
  const void* from = nullptr;    // rows of row_bytes, anywhere
  void* to = nullptr;            // [num_rows, row_bytes]
  const void* target = nullptr;  // [first_row + num_rows], of target_stride elements
  RowLayout from_rows;           // in elements of element_bytes
  std::int64_t first_row = 0, num_rows = 0;
  std::int64_t row_bytes = 0, target_stride = 1, ignore_index = -100;
  int element_bytes = 2;
  DType target_dtype = DType::kInt64;
};

// Where row i of the call begins, in bytes; whether it is scored.
RLK_HD std::int64_t scored_row_offset(const ScoredRowsParams& p, std::int64_t i) {
  return p.from_rows.offset(p.first_row + i) * p.element_bytes;
}
RLK_HD bool is_scored(const ScoredRowsParams& p, std::int64_t i) {
  return load_index(p.target, p.target_dtype, (p.first_row + i) * p.target_stride) != p.ignore_index;
}

}  // namespace rlk
