// Workspaces of operators that call other operators on some rows at a time: their arrays, the number of rows that fit,
// and the error if too few fit.
#pragma once

#include <cstdint>
#include <string>

#include "rlk/base.h"

namespace rlk {

constexpr std::int64_t kWorkspaceAlign = 256;
constexpr std::int64_t kFewestRows = 128;  // fewer rows at a time are slower: one tile of the products has 128

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t aligned(std::int64_t bytes) { return ceil_div(bytes, kWorkspaceAlign) * kWorkspaceAlign; }

inline unsigned char* at(void* base, std::int64_t bytes) { return static_cast<unsigned char*>(base) + bytes; }
inline const unsigned char* at(const void* base, std::int64_t bytes) {
  return static_cast<const unsigned char*>(base) + bytes;
}
template <class T>
T* from_row(T* array, std::int64_t row, std::int64_t each = 1) {
  return array == nullptr ? nullptr : array + row * each;
}
inline RowLayout dense(std::int64_t rows, std::int64_t columns) { return {rows > 1 ? rows : 1, 0, columns}; }

// The arrays in a workspace, one after another. Without a workspace (`base` is null), the sizes alone are valid.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(reinterpret_cast<std::uintptr_t>(base)) {}
  template <class T = unsigned char>
  T* take(std::int64_t bytes) {
    const std::uintptr_t piece = base_ + static_cast<std::uintptr_t>(used_);
    used_ += aligned(bytes);
    return reinterpret_cast<T*>(piece);
  }
  std::int64_t used() const { return used_; }

 private:
  std::uintptr_t base_;
  std::int64_t used_ = 0;
};

// The largest number of rows, up to `num_rows`, whose arrays fit the workspace. bytes_of(rows) must not descend as rows
// ascends.
template <class Bytes>
std::int64_t most_rows(std::int64_t num_rows, std::int64_t workspace_bytes, const Bytes& bytes_of) {
  std::int64_t low = 1, high = num_rows;  // bisects for the largest number of rows in [low, high] that fits
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    bytes_of(middle) <= workspace_bytes ? low = middle : high = middle - 1;
  }
  return low > kFewestRows ? low / kFewestRows * kFewestRows : low;
}

inline void require_workspace(const std::string& op, const void* workspace, std::int64_t bytes, std::int64_t least) {
  RLK_CHECK(bytes >= least,
            op + ": workspace_bytes: expected at least " + std::to_string(least) + ", got " + std::to_string(bytes));
  RLK_CHECK(workspace != nullptr && reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlign == 0,
            op + ": the workspace begins at a multiple of 256 bytes");
}

}  // namespace rlk
