// Loads and stores for kernels whose threads process eight neighbouring columns at a time.
#pragma once

#include "hip/common/element.h"
#include "hip/common/launch_shape.h"
#include "hip/common/wave.h"

namespace rlk::hip {

struct Columns {
  float v[kVec8];
};

// Loads the first `count` of eight columns and sets the others to +0. kVector: all eight columns exist, and their
// address is a multiple of 16 bytes.
template <class T, bool kVector>
RLK_DEVICE Columns load_columns(const typename T::Storage* from, std::int64_t count) {
  using Storage = typename T::Storage;
  Columns x;
  if constexpr (kVector) {
    struct Memory {
      Storage v[kVec8];
    } memory;
    __builtin_memcpy(&memory, __builtin_assume_aligned(from, 16), sizeof memory);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) x.v[j] = T::load(memory.v[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) x.v[j] = j < count ? T::load(from[j]) : 0.0f;
  }
  return x;
}
template <class T, bool kVector>
RLK_DEVICE void store_columns(typename T::Storage* to, std::int64_t count, const Columns& x) {
  using Storage = typename T::Storage;
  if constexpr (kVector) {
    struct Memory {
      Storage v[kVec8];
    } memory;
#pragma unroll
    for (int j = 0; j < kVec8; ++j) memory.v[j] = T::store(x.v[j]);
    __builtin_memcpy(__builtin_assume_aligned(to, 16), &memory, sizeof memory);
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      if (j < count) to[j] = T::store(x.v[j]);
    }
  }
}
template <class T>
RLK_DEVICE float rounded(float x) {
  return T::load(T::store(x));
}

template <class T>
RLK_DEVICE const typename T::Storage* row_at(const void* data, const RowLayout& rows, std::int64_t row) {
  return global_pointer(static_cast<const typename T::Storage*>(data)) + rows.offset(row);
}
template <class T>
RLK_DEVICE typename T::Storage* row_at(void* data, const RowLayout& rows, std::int64_t row) {
  return global_pointer(static_cast<typename T::Storage*>(data)) + rows.offset(row);
}

}  // namespace rlk::hip
