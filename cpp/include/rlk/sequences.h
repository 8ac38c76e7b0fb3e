// Sequences of tokens as operators over them take arrays: rows of a padded array, or one after another in a packed one.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/load_index.h"

namespace rlk {

// Padded: sequence s is row s of every array, all tokens of it. Packed: tokens [cu_seqlens[s], cu_seqlens[s + 1]), where
// cu_seqlens begins with 0, does not decrease and ends with num_tokens. A GPU takes what is out of order as empty or cut
// short, and touches no memory outside of the arrays; tokens that no sequence has are then not written.
struct Sequences {
  const void* cu_seqlens = nullptr;  // [num_sequences + 1], cu_dtype; null: padded
  DType cu_dtype = DType::kInt64;    // kInt32, kInt64
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;  // of a row; packed: of the array
};

// [num_sequences, num_tokens], tokens contiguous; packed [num_tokens] with row_stride 0.
template <class T>
struct TokenArray {
  T* data = nullptr;
  std::int64_t row_stride = 0;  // elements
};

// Which tokens count: those whose element is not zero. Without data all do.
struct TokenMask {
  const void* data = nullptr;
  std::int64_t row_stride = 0;
  DType dtype = DType::kBool;  // kBool, kInt32, kInt64, kFloat32
};

// Where a sequence is.
struct SequenceSpan {
  std::int64_t row, begin, length;
  RLK_HD std::int64_t offset(std::int64_t row_stride) const { return row * row_stride + begin; }
};

// [offsets[i], offsets[i + 1]) inside of [0, total], whatever the offsets are.
struct OffsetRange {
  std::int64_t begin, end;
};
RLK_HD std::int64_t clamp_index(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}
RLK_HD OffsetRange range_of(const void* offsets, DType t, std::int64_t i, std::int64_t total) {
  const std::int64_t begin = clamp_index(load_index(offsets, t, i), 0, total);
  return {begin, clamp_index(load_index(offsets, t, i + 1), begin, total)};
}

RLK_HD SequenceSpan span_of(const Sequences& q, std::int64_t sequence) {
  if (q.cu_seqlens == nullptr) return {sequence, 0, q.num_tokens};
  const OffsetRange r = range_of(q.cu_seqlens, q.cu_dtype, sequence, q.num_tokens);
  return {0, r.begin, r.end - r.begin};
}

RLK_HD bool counts(const void* mask, DType t, std::int64_t i) {
  switch (t) {
    case DType::kBool:
      return static_cast<const std::uint8_t*>(mask)[i] != 0;
    case DType::kInt64:
      return static_cast<const std::int64_t*>(mask)[i] != 0;
    case DType::kFloat32:
      return static_cast<const float*>(mask)[i] != 0.0f;
    default:
      return static_cast<const std::int32_t*>(mask)[i] != 0;
  }
}

}  // namespace rlk
