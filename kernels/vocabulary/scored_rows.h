// Gathers rows of hidden states for a product into consecutive rows. Rows that are not scored become zeros, so that
// their contents have no effect. The pass also copies rows of the gradients back to the places of the hidden states'
// rows.
#pragma once

#include <cstdint>

#include "kernels/rows/row_split.h"
#include "kernels/vocabulary/scored_groups.h"
#include "rlk/base.h"
#include "rlk/load_index.h"
#include "rlk/unroll.h"

namespace rlk {

struct ScoredRowsParams {
  const void* from = nullptr;  // rows of row_bytes, with any layout
  // [num_rows, row_bytes], with a distance of to_stride between rows. `to` may be the array `from` if the layouts are
  // equal.
  void* to = nullptr;
  const void* target = nullptr;  // [first_row + num_rows], at a stride of target_stride elements
  const std::int32_t* from_group =
      nullptr;          // for each group of `to`: the group of `from` to copy, or -1 for zeros; null: the same group
  bool back = false;    // false: row i of `from` has target i; true (a copy back): row i of `to` has target i
  RowLayout from_rows;  // in elements of element_bytes
  // the first row's index in the targets and (unless `back`) in `from`, and the number of rows
  std::int64_t first_row = 0, num_rows = 0;
  std::int64_t row_bytes = 0, to_stride = 0, target_stride = 1, ignore_index = -100;  // to_stride in elements
  int element_bytes = 2;
  DType target_dtype = DType::kInt64;
};

// The row of `from` that is copied to row i of `to`, or -1 if row i becomes zeros.
RLK_HD std::int64_t scored_source(const ScoredRowsParams& p, std::int64_t i) {
  std::int64_t source = i;
  if (p.from_group != nullptr) {
    const std::int32_t group = p.from_group[i / kScoredGroupRows];
    source = std::int64_t{group} * kScoredGroupRows + i % kScoredGroupRows;
    if (group < 0 || source >= p.num_rows) return -1;
  }
  const std::int64_t row = p.first_row + (p.back ? i : source);
  return load_index(p.target, p.target_dtype, row * p.target_stride) == p.ignore_index ? -1 : source;
}
// The offset of a row in bytes.
RLK_HD std::int64_t scored_from_offset(const ScoredRowsParams& p, std::int64_t source) {
  return p.from_rows.offset((p.back ? 0 : p.first_row) + source) * p.element_bytes;
}
RLK_HD std::int64_t scored_to_offset(const ScoredRowsParams& p, std::int64_t i) {
  return i * p.to_stride * p.element_bytes;
}

// On a GPU a block has 2^kScoredLog2Threads threads. A thread loads kScoredUnits units of a row before it stores them.
constexpr int kScoredLog2Threads = 7, kScoredUnits = 4;

// Whether the size of a row and the address of every row are multiples of 16 bytes.
inline bool scored_rows_have_vectors(const ScoredRowsParams& p) {
  const auto bits = reinterpret_cast<std::uintptr_t>(p.from) | reinterpret_cast<std::uintptr_t>(p.to) |
                    static_cast<std::uintptr_t>(p.row_bytes) |
                    static_cast<std::uintptr_t>(p.to_stride * p.element_bytes) |
                    static_cast<std::uintptr_t>(p.from_rows.inner_stride * p.element_bytes) |
                    static_cast<std::uintptr_t>(p.from_rows.outer_stride * p.element_bytes);
  return bits % 16 == 0;
}

template <class Unit>
RLK_HD void copy_scored_rows(const ScoredRowsParams& p, const RowSplit& split, std::uint32_t block, int thread) {
  const RowPlace place = place_in_rows(split, kScoredUnits, block, thread);
  if (place.row >= p.num_rows) return;
  const int units = static_cast<int>(p.row_bytes / static_cast<int>(sizeof(Unit)));
  const std::int64_t source = scored_source(p, place.row);
  const bool scored = source >= 0;
  if (scored && p.from == p.to) return;  // the row is in place already
  auto* const to = reinterpret_cast<Unit*>(static_cast<unsigned char*>(p.to) + scored_to_offset(p, place.row));
  const auto* const from = reinterpret_cast<const Unit*>(static_cast<const unsigned char*>(p.from) +
                                                         (scored ? scored_from_offset(p, source) : 0));
  Unit x[kScoredUnits];
  RLK_UNROLL
  for (int i = 0; i < kScoredUnits; ++i) {
    const int unit = place.first + i * place.step;
    x[i] = Unit{};
    if (scored && unit < units) x[i] = from[unit];
  }
  RLK_UNROLL
  for (int i = 0; i < kScoredUnits; ++i) {
    const int unit = place.first + i * place.step;
    if (unit < units) to[unit] = x[i];
  }
}

}  // namespace rlk
