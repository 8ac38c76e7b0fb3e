// Access to an array whose element type is known at run time, one vector at a time; the last vector of a row may be
// short.
#pragma once

#include <type_traits>

#include "simd.h"

namespace rlk::cpu::RLK_CPU_ISA {

template <class F>
RLK_HD void with_type(DType dtype, const F& f) {
  if (dtype == DType::kFloat32) {
    f(Fp32{});
  } else if (dtype == DType::kBFloat16) {
    f(Bf16{});
  } else {
    f(Fp16{});
  }
}

template <class T>
constexpr int kBytes = sizeof(typename T::Storage);

// Elements [k, k + columns) of an array; the remaining lanes are +0.
template <class T>
RLK_HD Floats load_at(const unsigned char* p, std::int64_t k, int columns) {
  p += k * kBytes<T>;
  if (columns == kLanes) return T::load(p);
  alignas(64) unsigned char padded[kLanes * kBytes<T>] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(columns) * kBytes<T>);
  return T::load(padded);
}
template <class T>
RLK_HD void store_at(unsigned char* p, std::int64_t k, int columns, Floats x) {
  p += k * kBytes<T>;
  if (columns == kLanes) return T::store(p, x);
  alignas(64) unsigned char padded[kLanes * kBytes<T>];
  T::store(padded, x);
  std::memcpy(p, padded, static_cast<std::size_t>(columns) * kBytes<T>);
}
// The value rounded to an element of type T.
template <class T>
RLK_HD Floats rounded(Floats x) {
  if constexpr (std::is_same_v<T, Fp32>) return x;
  alignas(64) unsigned char memory[kLanes * kBytes<T>];
  T::store(memory, x);
  return T::load(memory);
}

// Calls f(k, columns) for each vector of columns; the last may be short.
template <class F>
RLK_HD void for_each_vector(std::int64_t columns, const F& f) {
  std::int64_t k = 0;
  for (; k + kLanes <= columns; k += kLanes) f(k, kLanes);
  if (k < columns) f(k, static_cast<int>(columns - k));
}

}  // namespace rlk::cpu::RLK_CPU_ISA
