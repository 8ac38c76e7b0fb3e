// Four neighbouring tokens in the registers of a GPU's lane. A Vec4 has the functions of math/ieee.h, so the formulas
// of kernels/ and math/ also work on Vec4s. One uniform branch then decides for four tokens, and the instructions of
// the four tokens overlap.
#pragma once

#include "rlk/math/exp.h"
#include "rlk/math/ieee.h"

namespace rlk {

constexpr int kVec4 = 4;

struct Vec4Mask {
  std::int32_t v[kVec4];  // all ones or all zeros
};
struct Vec4Bits {
  std::int32_t v[kVec4];
};
struct Vec4 {
  float v[kVec4];
};

template <class R, class F>
RLK_HD R vec4_of(const F& f) {
  R r;
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll
#endif
  for (int i = 0; i < kVec4; ++i) r.v[i] = f(i);
  return r;
}

template <>
RLK_HD Vec4 broadcast<Vec4>(float a) {
  return {{a, a, a, a}};
}

RLK_HD Vec4 add_rn(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4>([&](int i) { return add_rn(a.v[i], b.v[i]); });
}
RLK_HD Vec4 sub_rn(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4>([&](int i) { return sub_rn(a.v[i], b.v[i]); });
}
RLK_HD Vec4 mul_rn(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4>([&](int i) { return mul_rn(a.v[i], b.v[i]); });
}
RLK_HD Vec4 div_rn(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4>([&](int i) { return div_rn(a.v[i], b.v[i]); });
}
RLK_HD Vec4 div_in_range(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4>([&](int i) { return div_in_range(a.v[i], b.v[i]); });
}
RLK_HD Vec4 fma_rn(const Vec4& a, const Vec4& b, const Vec4& c) {
  return vec4_of<Vec4>([&](int i) { return fma_rn(a.v[i], b.v[i], c.v[i]); });
}
RLK_HD Vec4 abs_of(const Vec4& a) {
  return vec4_of<Vec4>([&](int i) { return abs_of(a.v[i]); });
}
RLK_HD Vec4 operator-(const Vec4& a) {
  return vec4_of<Vec4>([&](int i) { return -a.v[i]; });
}

RLK_HD Vec4Mask operator<(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] < b.v[i] ? -1 : 0; });
}
RLK_HD Vec4Mask operator<=(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] <= b.v[i] ? -1 : 0; });
}
RLK_HD Vec4Mask operator>(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] > b.v[i] ? -1 : 0; });
}
RLK_HD Vec4Mask operator>=(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] >= b.v[i] ? -1 : 0; });
}
RLK_HD Vec4Mask operator==(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] == b.v[i] ? -1 : 0; });
}
// Whether two values differ and neither is NaN. The test takes one instruction.
RLK_HD Vec4Mask is_apart(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] < b.v[i] || a.v[i] > b.v[i] ? -1 : 0; });
}
RLK_HD Vec4Mask operator&(const Vec4Mask& a, const Vec4Mask& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] & b.v[i]; });
}
RLK_HD Vec4Mask operator|(const Vec4Mask& a, const Vec4Mask& b) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] | b.v[i]; });
}
RLK_HD bool any_of(const Vec4Mask& a) { return (a.v[0] | a.v[1] | a.v[2] | a.v[3]) != 0; }
// Computes one exponential at a time. The callers' exponentials are rare, and four at once would need more registers.
RLK_HD Vec4 exp_where(const Vec4Mask& mask, const Vec4& x) {
  return vec4_of<Vec4>([&](int i) {
    float y = 0.0f;
    if (mask.v[i] != 0) y = exp(x.v[i]);
    return y;
  });
}
// x if the mask is set, else +0. The selection takes one instruction, without a predicate.
RLK_HD Vec4 where(const Vec4Mask& mask, const Vec4& x) {
  return vec4_of<Vec4>([&](int i) { return float_of(bits_of(x.v[i]) & mask.v[i]); });
}
RLK_HD Vec4Mask is_nan(const Vec4& a) {
  return vec4_of<Vec4Mask>([&](int i) { return a.v[i] != a.v[i] ? -1 : 0; });  // one instruction
}
RLK_HD Vec4 select(const Vec4Mask& c, const Vec4& yes, const Vec4& no) {
  return vec4_of<Vec4>([&](int i) { return c.v[i] != 0 ? yes.v[i] : no.v[i]; });
}

// canonical() for the result of a multiplication. On CUDA its NaN has the bits 0x7fffffff, an integer that exceeds the
// bits of every number. One integer minimum therefore suffices.
RLK_HD Vec4 canonical_product(const Vec4& a) {
#if defined(__CUDA_ARCH__)
  return vec4_of<Vec4>([&](int i) { return float_of(min(bits_of(a.v[i]), bits_of(canonical_nan()))); });
#else
  return select(is_nan(a), broadcast<Vec4>(canonical_nan()), a);
#endif
}

// These functions replace the templates of terms.h. Each function takes one instruction instead of a comparison and a
// selection. If a bound is a zero, the result may be a zero of the other sign. No output of a caller depends on that
// sign.
#if defined(__CUDA_ARCH__)
RLK_HD float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
RLK_HD float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
RLK_HD Vec4 min_of(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4>([&](int i) { return min_or_nan(a.v[i], b.v[i]); });
}
RLK_HD Vec4 max_of(const Vec4& a, const Vec4& b) {
  return vec4_of<Vec4>([&](int i) { return max_or_nan(a.v[i], b.v[i]); });
}
// Requires low <= high. x is inside if clamping it to [low, high] does not change it. The caller computes the clamped
// value anyway, so the function adds two instructions.
RLK_HD Vec4 inside_or(const Vec4& x, float low, float high, const Vec4& value, const Vec4& outside) {
  return vec4_of<Vec4>([&](int i) {
    const float left = min_or_nan(max_or_nan(x.v[i], low), high);
    return left < x.v[i] || left > x.v[i] ? outside.v[i] : value.v[i];
  });
}
#endif

RLK_HD Vec4Bits bits_of(const Vec4& a) {
  return vec4_of<Vec4Bits>([&](int i) { return bits_of(a.v[i]); });
}
RLK_HD Vec4 float_of(const Vec4Bits& a) {
  return vec4_of<Vec4>([&](int i) { return float_of(a.v[i]); });
}
// Sums and differences of integers wrap around.
RLK_HD std::int32_t wrapped_sum(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
}
RLK_HD std::int32_t wrapped_difference(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) - static_cast<std::uint32_t>(b));
}
RLK_HD Vec4Bits operator+(const Vec4Bits& a, const Vec4Bits& b) {
  return vec4_of<Vec4Bits>([&](int i) { return wrapped_sum(a.v[i], b.v[i]); });
}
RLK_HD Vec4Bits operator-(const Vec4Bits& a, const Vec4Bits& b) {
  return vec4_of<Vec4Bits>([&](int i) { return wrapped_difference(a.v[i], b.v[i]); });
}
RLK_HD Vec4Bits operator+(const Vec4Bits& a, std::int32_t b) {
  return vec4_of<Vec4Bits>([&](int i) { return wrapped_sum(a.v[i], b); });
}
RLK_HD Vec4Bits operator-(const Vec4Bits& a, std::int32_t b) {
  return vec4_of<Vec4Bits>([&](int i) { return wrapped_difference(a.v[i], b); });
}
RLK_HD Vec4Bits operator<<(const Vec4Bits& a, int n) {
  return vec4_of<Vec4Bits>([&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) << n); });
}
RLK_HD Vec4Bits operator>>(const Vec4Bits& a, int n) {  // arithmetic shift
  return vec4_of<Vec4Bits>([&](int i) { return a.v[i] >> n; });
}

}  // namespace rlk
