// The angles of a token and the rotation of its vec8s, for every kernel of rope.
#pragma once

#include "../common/vec8.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

// A section's position id, or 0 for a call without ids.
__device__ __forceinline__ std::int64_t position_of(const RopeParams& p, const RopeToken& at, int section) {
  if (p.position_ids == nullptr) return 0;
  const std::int64_t i = at.id_offset(p, section);
  return p.id_dtype == DType::kInt64 ? static_cast<const std::int64_t*>(p.position_ids)[i]
                                     : static_cast<const std::int32_t*>(p.position_ids)[i];
}

// Tables in global memory, for the angles of a token.
struct TableAngles {
  const RopeParams& p;
  const RopeToken& at;

  __device__ __forceinline__ const void* cos() const { return p.cos.data; }
  __device__ __forceinline__ const void* sin() const { return p.sin.data; }
  __device__ __forceinline__ RopeRows rows_of_pair(int pair) const {
    const int section = rope_section(p, pair);
    return {p, at, section, position_of(p, at, section)};
  }
};

// kCount values of T or float32, up to 16 bytes, aligned to their total size.
template <class T, int kCount>
__device__ __forceinline__ void load_angles(const void* from, DType dtype, std::int64_t at, float* to) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + at + i);
      to[i] = v.x;
      to[i + 1] = v.y;
      to[i + 2] = v.z;
      to[i + 3] = v.w;
    }
  } else if constexpr (T::kPacked) {
    const typename T::Storage* p = static_cast<const typename T::Storage*>(from) + at;
    if constexpr (kCount == kVec8) {
      Vector<T>{*reinterpret_cast<const uint4*>(p)}.to_float(to);
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      to[0] = T::low(v.x);
      to[1] = T::high(v.x);
      to[2] = T::low(v.y);
      to[3] = T::high(v.y);
    }
  }
}

// The angles of the pairs in a thread's two vec8s. kPerPair: one angle a pair; else one a column, in the order of columns.
// In the interleaved layout the first half of the angles belongs to the first vec8.
template <class T, bool kPerPair>
struct Vec8Angles {
  static constexpr int kCount = kPerPair ? kVec8 : 2 * kVec8;
  float cos[kCount], sin[kCount];

  template <class Angles>
  __device__ __forceinline__ void load(const RopeParams& p, const Angles& from, int column_a, int column_b) {
    if (p.interleaved) {
      constexpr int kHalf = kCount / 2;
      load_rows<kHalf>(p, from, column_a / 2, kPerPair ? column_a / 2 : column_a, cos, sin);
      load_rows<kHalf>(p, from, column_b / 2, kPerPair ? column_b / 2 : column_b, cos + kHalf, sin + kHalf);
    } else {
      load_rows<kVec8>(p, from, column_a, column_a, cos, sin);
      if constexpr (!kPerPair) load_rows<kVec8>(p, from, column_a, column_b, cos + kVec8, sin + kVec8);
    }
    if (p.transposed) transpose(p.interleaved);
  }

 private:
  template <int kSome, class Angles>
  static __device__ __forceinline__ void load_rows(const RopeParams& p, const Angles& from, int pair, int column,
                                                   float* cos, float* sin) {
    const RopeRows rows = from.rows_of_pair(pair);
    if (rows.exist) {
      load_angles<T, kSome>(from.cos(), p.angle_dtype, rows.cos + column, cos);
      load_angles<T, kSome>(from.sin(), p.angle_dtype, rows.sin + column, sin);
    } else {
#pragma unroll
      for (int i = 0; i < kSome; ++i) cos[i] = sin[i] = canonical_nan();
    }
    if (T::kPacked && p.round_products) {
#pragma unroll
      for (int i = 0; i < kSome; ++i) {
        cos[i] = T::load(T::store(cos[i]));
        sin[i] = T::load(T::store(sin[i]));
      }
    }
  }
  // -sin_b for sin_a and -sin_a for sin_b.
  __device__ __forceinline__ void transpose(bool interleaved) {
    if constexpr (kPerPair) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sin[i] = -sin[i];
    } else {
      float other[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) other[i] = -(interleaved ? sin[i ^ 1] : sin[i ^ kVec8]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sin[i] = other[i];
    }
  }
};

// A vec8 of first elements (kSign -1) or of second ones (+1) of pairs, or of pairs side by side (0): x cos -+ other sin.
template <class T, int kSign, class Cos, class Sin>
__device__ __forceinline__ void rotate_vec8(const float (&x)[kVec8], const float (&other)[kVec8], const Cos& cos,
                                            const Sin& sin, bool round_products, float (&y)[kVec8]) {
  float product[kVec8];
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    product[j] = __fmul_rn(other[j], sin(j));
    // Rounding is symmetric, so the negation is exact.
    if (kSign < 0 || (kSign == 0 && j % 2 == 0)) product[j] = -product[j];
  }
  if (round_products) {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) y[j] = __fmul_rn(x[j], cos(j));
    round_vec8<T>(y);
    round_vec8<T>(product);
#pragma unroll
    for (int j = 0; j < kVec8; ++j) y[j] = __fadd_rn(y[j], product[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kVec8; ++j) y[j] = __fmaf_rn(x[j], cos(j), product[j]);
  }
}

template <class T, bool kPerPair>
__device__ __forceinline__ void rotate_vec8s(const RopeParams& p, const Vec8Angles<T, kPerPair>& angles, Vec8<T>* a,
                                             Vec8<T>* b) {
  float x[kVec8], y[kVec8], first[kVec8], second[kVec8];
  a->to_float(x);
  b->to_float(y);
  if (p.interleaved) {
    float x_other[kVec8], y_other[kVec8];
#pragma unroll
    for (int j = 0; j < kVec8; ++j) {
      x_other[j] = x[j ^ 1];
      y_other[j] = y[j ^ 1];
    }
    constexpr int kHalf = Vec8Angles<T, kPerPair>::kCount / 2;
    const auto of = [](const float* values) { return [values](int j) { return values[kPerPair ? j / 2 : j]; }; };
    rotate_vec8<T, 0>(x, x_other, of(angles.cos), of(angles.sin), p.round_products, first);
    rotate_vec8<T, 0>(y, y_other, of(angles.cos + kHalf), of(angles.sin + kHalf), p.round_products, second);
  } else {
    constexpr int kSecond = kPerPair ? 0 : kVec8;
    const auto of = [](const float* values) { return [values](int j) { return values[j]; }; };
    rotate_vec8<T, -1>(x, y, of(angles.cos), of(angles.sin), p.round_products, first);
    rotate_vec8<T, 1>(y, x, of(angles.cos + kSecond), of(angles.sin + kSecond), p.round_products, second);
  }
  *a = vec8_of<T>(first);
  *b = vec8_of<T>(second);
}

}  // namespace
}  // namespace rlk::cuda
