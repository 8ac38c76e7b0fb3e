// A stage is the part of an operand that a block loads at a time. A stage moves from global memory to registers, from
// registers to LDS, and from LDS to a matrix instruction.
//
// LDS holds the rows of a tile. Each row has consecutive contraction indices, in vec4s of four 16-bit elements. A lane
// passes one vec4 to a matrix instruction. The vec4s of a row are permuted by the row's number. LDS processes the reads
// of 16 lanes together, and these lanes read the same vec4 of 16 different rows. With the permutation they hit all 32
// banks. Elements past the operand's edges are +0.
#pragma once

#include "hip/common/wave.h"
#include "hip/linear/launches.h"

namespace rlk::hip {

using Vec4 = std::uint64_t;  // four elements, the first in the low bits
struct Vec8 {
  Vec4 low, high;
};

// The position of a vec4 in a row of a tile.
template <int kStageK>
RLK_DEVICE int vec4_at(int row, int vec4) {
  constexpr int kVec4s = kStageK / 4, kBankVec4s = 16;  // 16 vec4s cover the 32 banks
  return (row * kVec4s + (vec4 ^ (row * kVec4s / kBankVec4s) % kVec4s)) * 4;
}
template <int kStageK>
RLK_DEVICE void store_vec4(std::uint16_t* tile, int row, int vec4, Vec4 x) {
  __builtin_memcpy(__builtin_assume_aligned(tile + vec4_at<kStageK>(row, vec4), 8), &x, sizeof x);
}
template <class Operand, int kStageK>
RLK_DEVICE Operand load_vec4(const std::uint16_t* tile, int row, int vec4) {
  Operand x;
  __builtin_memcpy(&x, __builtin_assume_aligned(tile + vec4_at<kStageK>(row, vec4), 8), sizeof x);
  return x;
}

// Loads a vector from an address that is a multiple of the vector's size.
template <class Vector>
RLK_DEVICE Vector load_vector(const std::uint16_t* from) {
  Vector x;
  __builtin_memcpy(&x, __builtin_assume_aligned(from, sizeof x), sizeof x);
  return x;
}
// Loads elements [first, first + 4) of a row. In place of elements from `end` (> 0) on, it loads the element before
// `end`. No load depends on a branch, so the loads are in flight together.
RLK_DEVICE Vec4 load_clamped(const std::uint16_t* row, std::int64_t first, std::int64_t end) {
  Vec4 x = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) x |= Vec4{row[first + j < end ? first + j : end - 1]} << (16 * j);
  return x;
}
// Returns the first `count` elements of a vec4, followed by +0.
RLK_DEVICE Vec4 first_of(Vec4 x, std::int64_t count) {
  if (count >= 4) return x;
  return count <= 0 ? 0 : x & ((Vec4{1} << (16 * static_cast<int>(count))) - 1);
}

// Loads kRows rows of a tile for an operand whose memory rows run along the contraction index. A thread loads vec8s of
// a row.
template <int kRows, int kStageK>
class AlongRows {
  static constexpr int kVec8s = kStageK / kAlongRow, kUnits = kRows * kVec8s;
  static constexpr int kEach = (kUnits + kGemmThreads - 1) / kGemmThreads, kApart = kGemmThreads / kVec8s;

 public:
  // The tile's rows begin at `first`. Past the operand's last row, the last row is loaded again, and outputs of such
  // rows are not stored.
  RLK_DEVICE AlongRows(const GemmOperand& x, std::int64_t first, std::int64_t size)
      : vectors_(x.vectors), row_(thread_id() / kVec8s), column_(thread_id() % kVec8s * kAlongRow) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int64_t row = first + row_ + i * kApart;
      from_[i] = global_pointer(static_cast<const std::uint16_t*>(x.data)) + x.rows.offset(row < size ? row : size - 1);
    }
  }
  // Loads contraction indices [k, k + kStageK). Elements from `end` on become +0.
  RLK_DEVICE void load(std::int64_t k, std::int64_t end) {
    if (vectors_ && end - k >= kStageK) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) values_[i] = load_vector<Vec8>(from_[i] + k + column_);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const std::int64_t at = k + column_;
        values_[i] = {first_of(load_clamped(from_[i], at, end), end - at),
                      first_of(load_clamped(from_[i], at + 4, end), end - at - 4)};
      }
    }
  }
  RLK_DEVICE void store(std::uint16_t* tile) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = row_ + i * kApart;
      if (kUnits % kGemmThreads != 0 && row >= kRows) continue;
      const Vec8& x = values_[i];
      store_vec4<kStageK>(tile, row, column_ / 4, x.low);
      store_vec4<kStageK>(tile, row, column_ / 4 + 1, x.high);
    }
  }

 private:
  const bool vectors_;
  const int row_, column_;
  const std::uint16_t* from_[kEach];
  Vec8 values_[kEach];
};

// Loads kRows rows of a tile for an operand that is stored transposed: each of its memory rows holds one contraction
// index. A thread loads squares of four by four elements and transposes them.
template <int kRows, int kStageK>
class AcrossRows {
  static constexpr int kVec4s = kStageK / 4, kRowVec4s = (kRows / 4 + 7) / 8 * 8, kUnits = kVec4s * kRowVec4s;
  static constexpr int kEach = (kUnits + kGemmThreads - 1) / kGemmThreads;
  static constexpr bool kAllWork = kRowVec4s == kRows / 4 && kUnits % kGemmThreads == 0;

 public:
  // The tile's columns begin at `first`. Past the operand's last column, an earlier column is loaded again, and outputs
  // of such columns are not stored.
  RLK_DEVICE AcrossRows(const GemmOperand& x, std::int64_t first, std::int64_t size)
      : x_(x), from_(global_pointer(static_cast<const std::uint16_t*>(x.data)) + first), size_(size - first) {}
  RLK_DEVICE void load(std::int64_t k, std::int64_t end) {
    const auto row = [&](int i, int j) { return k + vec4(i) * 4 + j; };
    if (x_.vectors && end - k >= kStageK) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int at = column(i) < size_ ? column(i) : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) values_[i][j] = load_vector<Vec4>(from_ + x_.rows.offset(row(i, j)) + at);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool exists = row(i, j) < end;
          const Vec4 x = load_clamped(from_ + x_.rows.offset(exists ? row(i, j) : end - 1), column(i), size_);
          values_[i][j] = exists ? x : 0;
        }
      }
    }
  }
  RLK_DEVICE void store(std::uint16_t* tile) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!kAllWork && column(i) >= kRows) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Vec4 x = 0;
#pragma unroll
        for (int row = 0; row < 4; ++row) x |= (values_[i][row] >> (16 * j) & 0xffff) << (16 * row);
        store_vec4<kStageK>(tile, column(i) + j, vec4(i), x);
      }
    }
  }

 private:
  // With this assignment of columns to threads, eight neighbouring lanes read 64 bytes of a row, and the lanes' writes
  // to LDS have few bank conflicts.
  static RLK_DEVICE int vec4(int i) { return (thread_id() + i * kGemmThreads) / 8 % kVec4s; }
  static RLK_DEVICE int column(int i) {
    const int unit = thread_id() + i * kGemmThreads;
    return (unit / (8 * kVec4s) * 8 + unit % 8) * 4;
  }

  const GemmOperand& x_;
  const std::uint16_t* const from_;
  const std::int64_t size_;
  Vec4 values_[kEach][4];
};

}  // namespace rlk::hip
