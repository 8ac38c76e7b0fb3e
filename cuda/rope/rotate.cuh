// The angles of a token and the rotation of its vec8s, for every kernel of rope.
#pragma once

#include <type_traits>

#include "../common/vec8.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Returns a section's position id, or 0 for a call without ids.
__device__ __forceinline__ std::int64_t position_of(const RopeParams& p, const RopeToken& at, int section) {
  if (p.position_ids == nullptr) return 0;
  const std::int64_t i = at.id_offset(p, section);
  return p.id_dtype == DType::kInt64 ? static_cast<const std::int64_t*>(p.position_ids)[i]
                                     : static_cast<const std::int32_t*>(p.position_ids)[i];
}

// The angles of a token, from tables in global memory.
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

// Cosines or sines in a thread's registers. WideValues holds float32 numbers. NarrowValues holds two numbers of type T
// per word.
template <int kCount>
struct WideValues {
  float v[kCount];

  __device__ __forceinline__ float operator()(int i) const { return v[i]; }
  __device__ __forceinline__ void fill_nan(int first, int count) {
#pragma unroll
    for (int i = 0; i < count; ++i) v[first + i] = canonical_nan();
  }
  // Loads `count` values (four or eight). The address is a multiple of their total size.
  __device__ __forceinline__ void load(const void* from, std::int64_t at, int first, int count) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + at + i);
      v[first + i] = x.x;
      v[first + i + 1] = x.y;
      v[first + i + 2] = x.z;
      v[first + i + 3] = x.w;
    }
  }
  template <class T>
  __device__ __forceinline__ void round(int first, int count) {
#pragma unroll
    for (int i = first; i < first + count; ++i) v[i] = T::load(T::store(v[i]));
  }
  __device__ __forceinline__ void negate() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = -v[i];
  }
  __device__ __forceinline__ void negate(bool even, bool odd) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = (i % 2 == 0 ? even : odd) ? -v[i] : v[i];
  }
  // Repeats each of the first kCount / 2 values, so that both columns of an interleaved pair have the pair's angle.
  __device__ __forceinline__ void repeat() {
#pragma unroll
    for (int i = kCount - 1; i > 0; --i) v[i] = v[i / 2];
  }
  // For each pair of columns, exchanges the two values. The values of a pair are neighbours, or eight places apart.
  __device__ __forceinline__ void exchange(bool neighbours) {
    float other[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) other[i] = neighbours ? v[i ^ 1] : v[i ^ kVec8];
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = other[i];
  }
};
template <class T, int kCount>
struct NarrowValues {
  std::uint32_t v[kCount / 2];

  __device__ __forceinline__ float operator()(int i) const { return i % 2 == 0 ? T::low(v[i / 2]) : T::high(v[i / 2]); }
  __device__ __forceinline__ void fill_nan(int first, int count) {
#pragma unroll
    for (int i = 0; i < count / 2; ++i) v[first / 2 + i] = T::pack(canonical_nan(), canonical_nan());
  }
  __device__ __forceinline__ void load(const void* from, std::int64_t at, int first, int count) {
    const typename T::Storage* p = static_cast<const typename T::Storage*>(from) + at;
    if (count == kVec8) {
      const uint4 x = *reinterpret_cast<const uint4*>(p);
      v[first / 2] = x.x;
      v[first / 2 + 1] = x.y;
      v[first / 2 + 2] = x.z;
      v[first / 2 + 3] = x.w;
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(p);
      v[first / 2] = x.x;
      v[first / 2 + 1] = x.y;
    }
  }
  template <class>
  __device__ __forceinline__ void round(int, int) {}  // nothing to do: the angles already have type T
  __device__ __forceinline__ void negate() {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) v[i] ^= 0x80008000u;
  }
  __device__ __forceinline__ void negate(bool even, bool odd) {
    const std::uint32_t signs = (even ? 0x8000u : 0u) | (odd ? 0x80000000u : 0u);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) v[i] ^= signs;
  }
  __device__ __forceinline__ void repeat() {
#pragma unroll
    for (int i = kCount / 2 - 1; i >= 0; --i) v[i] = __byte_perm(v[i / 2], 0, i % 2 == 0 ? 0x1010 : 0x3232);
  }
  __device__ __forceinline__ void exchange(bool neighbours) {
    std::uint32_t other[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      other[i] = neighbours ? __byte_perm(v[i], 0, 0x1032) : v[i ^ kVec8 / 2];
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) v[i] = other[i];
  }
};

// The angles of the pairs in a thread's two vec8s. If kPerPair, there is one angle per pair. If not, there is one angle
// per column, in the order of columns. In the interleaved layout the first half of the angles belongs to the first
// vec8. kNarrow: the angles have type T.
template <class T, bool kPerPair_, bool kNarrow>
struct Vec8Angles {
  static constexpr bool kPerPair = kPerPair_;
  static constexpr int kCount = kPerPair ? kVec8 : 2 * kVec8;
  static constexpr int kRegisters = kNarrow ? kCount : 2 * kCount;
  using Values = std::conditional_t<kNarrow, NarrowValues<T, kCount>, WideValues<kCount>>;
  Values cos, sin;

  template <class Angles>
  __device__ __forceinline__ void load(const RopeParams& p, const Angles& from, int column_a, int column_b) {
    if (p.interleaved) {
      constexpr int kHalf = kCount / 2;
      load_rows<kHalf>(p, from, column_a / 2, kPerPair ? column_a / 2 : column_a, 0);
      load_rows<kHalf>(p, from, column_b / 2, kPerPair ? column_b / 2 : column_b, kHalf);
    } else {
      load_rows<kVec8>(p, from, column_a, column_a, 0);
      if constexpr (!kPerPair) load_rows<kVec8>(p, from, column_a, column_b, kVec8);
    }
    if (!p.transposed) return;
    sin.negate();  // then exchange() swaps sin_a and sin_b, if they differ
    if constexpr (!kPerPair) sin.exchange(p.interleaved);
  }

 private:
  template <int kSome, class Angles>
  __device__ __forceinline__ void load_rows(const RopeParams& p, const Angles& from, int pair, int column, int first) {
    const RopeRows rows = from.rows_of_pair(pair);
    if (rows.exist) {
      cos.load(from.cos(), rows.cos + column, first, kSome);
      sin.load(from.sin(), rows.sin + column, first, kSome);
    } else {
      cos.fill_nan(first, kSome);
      sin.fill_nan(first, kSome);
    }
    if (T::kPacked && p.round_products) {
      cos.template round<T>(first, kSome);
      sin.template round<T>(first, kSome);
    }
  }
};

// Calls f(angles), where `angles` has the type Vec8Angles<...> that fits the call.
template <class T, class F>
void with_angles(const RopeParams& p, const F& f) {
  const auto with = [&](auto per_pair) {
    if constexpr (T::kPacked) {
      if (p.angle_dtype != DType::kFloat32) return f(Vec8Angles<T, per_pair(), true>{});
    }
    f(Vec8Angles<T, per_pair(), false>{});
  };
  p.width < p.rotary_dim ? with(std::true_type{}) : with(std::false_type{});
}

// Rotates a vec8. If x holds first elements of pairs (kSign -1), y = x cos - other sin. If x holds second elements
// (kSign 1), y = x cos + other sin. If first and second elements alternate in x, kSign is 0.
template <class T, int kSign, class Cos, class Sin>
__device__ __forceinline__ void rotate_vec8(const float (&x)[kVec8], const float (&other)[kVec8], const Cos& cos,
                                            const Sin& sin, bool round_products, float (&y)[kVec8]) {
  float product[kVec8];
#pragma unroll
  for (int j = 0; j < kVec8; ++j) {
    product[j] = __fmul_rn(other[j], sin(j));
    // Rounding is symmetric, so the negated product has the bits of a product with a negated sine.
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

template <class T, class Angles>
__device__ __forceinline__ void rotate_vec8s(const RopeParams& p, const Angles& angles, Vec8<T>* a, Vec8<T>* b) {
  constexpr bool kPerPair = Angles::kPerPair;
  using Values = typename Angles::Values;
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
    constexpr int kHalf = Angles::kCount / 2;
    const auto of = [](const Values& values, int at) {
      return [&values, at](int j) { return values(at + (kPerPair ? j / 2 : j)); };
    };
    rotate_vec8<T, 0>(x, x_other, of(angles.cos, 0), of(angles.sin, 0), p.round_products, first);
    rotate_vec8<T, 0>(y, y_other, of(angles.cos, kHalf), of(angles.sin, kHalf), p.round_products, second);
  } else {
    constexpr int kSecond = kPerPair ? 0 : kVec8;
    const auto of = [](const Values& values, int at) { return [&values, at](int j) { return values(at + j); }; };
    rotate_vec8<T, -1>(x, y, of(angles.cos, 0), of(angles.sin, 0), p.round_products, first);
    rotate_vec8<T, 1>(y, x, of(angles.cos, kSecond), of(angles.sin, kSecond), p.round_products, second);
  }
  *a = vec8_of<T>(first);
  *b = vec8_of<T>(second);
}

}  // namespace
}  // namespace rlk::cuda
