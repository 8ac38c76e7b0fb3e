// Element types of arrays in memory: eight columns at a time to and from fp32, packed comparison of two.
#pragma once

#include <cstdint>

#include "rlk/math/half.h"
#include "rlk/math/ieee.h"

namespace rlk::cuda {

// Tag types: the storage of an element and its arithmetic on packed pairs.
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
  // NaN if either is NaN.
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

// 2^x by the hardware unit: the exponential of Exp::kHardware.
__device__ __forceinline__ float ex2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

constexpr int kOctet = 8;  // columns handled together: 16 bytes of a 2-byte type, 32 of fp32

template <class T>
struct Octet {
  static constexpr int kVectors = kOctet * sizeof(typename T::Storage) / 16;
  uint4 v[kVectors];

  __device__ __forceinline__ void to_float(float (&z)[kOctet]) const {
    if constexpr (T::kPacked) {
      const std::uint32_t w[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        z[2 * i] = T::low(w[i]);
        z[2 * i + 1] = T::high(w[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        z[4 * i] = __uint_as_float(v[i].x);
        z[4 * i + 1] = __uint_as_float(v[i].y);
        z[4 * i + 2] = __uint_as_float(v[i].z);
        z[4 * i + 3] = __uint_as_float(v[i].w);
      }
    }
  }
  __device__ __forceinline__ void from_float(const float (&z)[kOctet]) {
    if constexpr (T::kPacked) {
      v[0] = make_uint4(T::pack(z[0], z[1]), T::pack(z[2], z[3]), T::pack(z[4], z[5]), T::pack(z[6], z[7]));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        v[i] = make_uint4(__float_as_uint(T::store(z[4 * i])), __float_as_uint(T::store(z[4 * i + 1])),
                          __float_as_uint(T::store(z[4 * i + 2])), __float_as_uint(T::store(z[4 * i + 3])));
      }
    }
  }
};

}  // namespace rlk::cuda
