// Element types of arrays in memory: conversion of eight columns to and from fp32, and operations on packed pairs.
#pragma once

#include <cstdint>

#include "rlk/math/half.h"
#include "rlk/math/ieee.h"

namespace rlk::cuda {

// The truth of a condition for each of two packed elements.
struct PairOfConditions {
  bool low, high;
};

// Tag types of elements. A tag type has the storage type and its conversions. A tag type of 16 bits also has arithmetic
// on two elements that are packed in a word.
struct Bf16 {
  using Storage = std::uint16_t;
  static constexpr bool kPacked = true;
  static __device__ __forceinline__ float low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  static __device__ __forceinline__ float load(Storage s) { return __uint_as_float(std::uint32_t{s} << 16); }
  static __device__ __forceinline__ Storage store(float x) {
    Storage s;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(s) : "f"(x));
    return s;
  }
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  // Multiplies two packed pairs; each product is rounded once. tests/cpp/test_math.cpp shows that rounding the fp32
  // products to bf16 gives the same results.
  static __device__ __forceinline__ std::uint32_t mul2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));  // adding -0 keeps a zero's sign
#endif
    return r;
  }
  // The larger of two numbers; NaN if one of them is NaN.
  static __device__ __forceinline__ std::uint32_t max2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ std::uint32_t min2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ PairOfConditions negative2(std::uint32_t a) {
#if __CUDA_ARCH__ >= 900
    int low, high;
    asm("{\n\t.reg .pred p, q;\n\tsetp.lt.bf16x2 p|q, %2, %3;\n\tselp.s32 %0, 1, 0, p;\n\tselp.s32 %1, 1, 0, q;\n\t}"
        : "=r"(low), "=r"(high)
        : "r"(a), "r"(0));
    return {low != 0, high != 0};
#else
    return {Bf16::low(a) < 0.0f, Bf16::high(a) < 0.0f};
#endif
  }
};

struct Fp16 {
  using Storage = std::uint16_t;
  static constexpr bool kPacked = true;
  static __device__ __forceinline__ float load(Storage s) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(s));
    return x;
  }
  static __device__ __forceinline__ float low(std::uint32_t pair) { return load(static_cast<Storage>(pair)); }
  static __device__ __forceinline__ float high(std::uint32_t pair) { return load(static_cast<Storage>(pair >> 16)); }
  static __device__ __forceinline__ Storage store(float x) {
    Storage s;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(s) : "f"(x));
    return s;
  }
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  static __device__ __forceinline__ std::uint32_t mul2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));  // equals the rounded fp32 product
    return r;
  }
  static __device__ __forceinline__ std::uint32_t max2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ std::uint32_t min2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static __device__ __forceinline__ PairOfConditions negative2(std::uint32_t a) {
    int low, high;
    asm("{\n\t.reg .pred p, q;\n\tsetp.lt.f16x2 p|q, %2, %3;\n\tselp.s32 %0, 1, 0, p;\n\tselp.s32 %1, 1, 0, q;\n\t}"
        : "=r"(low), "=r"(high)
        : "r"(a), "r"(0));
    return {low != 0, high != 0};
  }
};

struct Fp32 {
  using Storage = float;
  static constexpr bool kPacked = false;
  static __device__ __forceinline__ float load(Storage s) { return s; }
  static __device__ __forceinline__ Storage store(float x) { return is_nan(x) ? canonical_nan() : x; }
};

__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Returns 2^x by the GPU's special function unit. Calls with Exp::kHardware use this exponential.
__device__ __forceinline__ float ex2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Sixteen bytes of neighbouring columns.
template <class T>
struct Vector {
  static constexpr int kColumns = 16 / static_cast<int>(sizeof(typename T::Storage));
  uint4 v;

  __device__ __forceinline__ void to_float(float* z) const {
    const std::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (T::kPacked) {
        z[2 * i] = T::low(w[i]);
        z[2 * i + 1] = T::high(w[i]);
      } else {
        z[i] = __uint_as_float(w[i]);
      }
    }
  }
  __device__ __forceinline__ void from_float(const float* z) {
    if constexpr (T::kPacked) {
      v = make_uint4(T::pack(z[0], z[1]), T::pack(z[2], z[3]), T::pack(z[4], z[5]), T::pack(z[6], z[7]));
    } else {
      v = make_uint4(__float_as_uint(T::store(z[0])), __float_as_uint(T::store(z[1])), __float_as_uint(T::store(z[2])),
                     __float_as_uint(T::store(z[3])));
    }
  }
};

constexpr int kVec8 = 8;  // columns per vector of a thread: 16 bytes for 2-byte types, 32 bytes for fp32

template <class T>
struct Vec8 {
  static constexpr int kVectors = kVec8 / Vector<T>::kColumns;
  Vector<T> v[kVectors];

  __device__ __forceinline__ void to_float(float (&z)[kVec8]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i].to_float(z + i * Vector<T>::kColumns);
  }
};

// The largest and the smallest of several values. The largest is NaN if any value is NaN.
struct Range {
  float largest, smallest;
};
template <class T>
struct RangeOf {  // two values packed in a word
  std::uint32_t high, low;
  __device__ __forceinline__ explicit RangeOf(const Vector<T>& first) : high(first.v.x), low(first.v.x) {}
  __device__ __forceinline__ void add(const Vector<T>& x) {
    high = T::max2(T::max2(high, x.v.x), T::max2(x.v.y, T::max2(x.v.z, x.v.w)));
    low = T::min2(T::min2(low, x.v.x), T::min2(x.v.y, T::min2(x.v.z, x.v.w)));
  }
  __device__ __forceinline__ Range range() const {
    return {max_nan(T::low(high), T::high(high)), fminf(T::low(low), T::high(low))};
  }
};
template <>
struct RangeOf<Fp32> {
  float high, low;
  __device__ __forceinline__ explicit RangeOf(const Vector<Fp32>&) : high(-infinity()), low(infinity()) {}
  __device__ __forceinline__ void add(const Vector<Fp32>& x) {
    float z[Vector<Fp32>::kColumns];
    x.to_float(z);
#pragma unroll
    for (float value : z) {
      high = max_nan(high, value);
      low = fminf(low, value);
    }
  }
  __device__ __forceinline__ Range range() const { return {high, low}; }
};

}  // namespace rlk::cuda
