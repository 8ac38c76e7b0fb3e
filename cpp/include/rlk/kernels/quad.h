// Four neighbouring tokens in the registers of a GPU's lane. They answer to the names of math/ieee.h, so the formulas of
// kernels/ and math/ run on them. One uniform branch serves four tokens, whose instructions overlap.
#pragma once

#include "rlk/math/exp.h"
#include "rlk/math/ieee.h"

namespace rlk {

constexpr int kQuad = 4;

struct QuadMask {
  std::int32_t v[kQuad];  // all ones or all zeros
};
struct QuadBits {
  std::int32_t v[kQuad];
};
struct Quad {
  float v[kQuad];
};

template <class R, class F>
RLK_HD R quad_of(const F& f) {
  R r;
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll
#endif
  for (int i = 0; i < kQuad; ++i) r.v[i] = f(i);
  return r;
}

template <>
RLK_HD Quad broadcast<Quad>(float a) {
  return {{a, a, a, a}};
}

RLK_HD Quad add_rn(const Quad& a, const Quad& b) {
  return quad_of<Quad>([&](int i) { return add_rn(a.v[i], b.v[i]); });
}
RLK_HD Quad sub_rn(const Quad& a, const Quad& b) {
  return quad_of<Quad>([&](int i) { return sub_rn(a.v[i], b.v[i]); });
}
RLK_HD Quad mul_rn(const Quad& a, const Quad& b) {
  return quad_of<Quad>([&](int i) { return mul_rn(a.v[i], b.v[i]); });
}
RLK_HD Quad div_rn(const Quad& a, const Quad& b) {
  return quad_of<Quad>([&](int i) { return div_rn(a.v[i], b.v[i]); });
}
RLK_HD Quad div_in_range(const Quad& a, const Quad& b) {
  return quad_of<Quad>([&](int i) { return div_in_range(a.v[i], b.v[i]); });
}
RLK_HD Quad fma_rn(const Quad& a, const Quad& b, const Quad& c) {
  return quad_of<Quad>([&](int i) { return fma_rn(a.v[i], b.v[i], c.v[i]); });
}
RLK_HD Quad abs_of(const Quad& a) {
  return quad_of<Quad>([&](int i) { return abs_of(a.v[i]); });
}
RLK_HD Quad operator-(const Quad& a) {
  return quad_of<Quad>([&](int i) { return -a.v[i]; });
}

RLK_HD QuadMask operator<(const Quad& a, const Quad& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] < b.v[i] ? -1 : 0; });
}
RLK_HD QuadMask operator<=(const Quad& a, const Quad& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] <= b.v[i] ? -1 : 0; });
}
RLK_HD QuadMask operator>(const Quad& a, const Quad& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] > b.v[i] ? -1 : 0; });
}
RLK_HD QuadMask operator>=(const Quad& a, const Quad& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] >= b.v[i] ? -1 : 0; });
}
RLK_HD QuadMask operator==(const Quad& a, const Quad& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] == b.v[i] ? -1 : 0; });
}
// Neither is NaN, and they are not equal: one instruction.
RLK_HD QuadMask is_apart(const Quad& a, const Quad& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] < b.v[i] || a.v[i] > b.v[i] ? -1 : 0; });
}
RLK_HD QuadMask operator&(const QuadMask& a, const QuadMask& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] & b.v[i]; });
}
RLK_HD QuadMask operator|(const QuadMask& a, const QuadMask& b) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] | b.v[i]; });
}
RLK_HD bool any_of(const QuadMask& a) { return (a.v[0] | a.v[1] | a.v[2] | a.v[3]) != 0; }
// Token by token, as it is rare and takes registers.
RLK_HD Quad exp_where(const QuadMask& mask, const Quad& x) {
  return quad_of<Quad>([&](int i) {
    float y = 0.0f;
    if (mask.v[i] != 0) y = exp(x.v[i]);
    return y;
  });
}
// x where a token counts: one instruction, which needs no predicate.
RLK_HD Quad where(const QuadMask& mask, const Quad& x) {
  return quad_of<Quad>([&](int i) { return float_of(bits_of(x.v[i]) & mask.v[i]); });
}
RLK_HD QuadMask is_nan(const Quad& a) {
  return quad_of<QuadMask>([&](int i) { return a.v[i] != a.v[i] ? -1 : 0; });  // one instruction
}
RLK_HD Quad select(const QuadMask& c, const Quad& yes, const Quad& no) {
  return quad_of<Quad>([&](int i) { return c.v[i] != 0 ? yes.v[i] : no.v[i]; });
}

// As canonical, of what a multiplication gives, whose NaN is 0x7fffffff on CUDA: as integers above every number, so that this is
// one instruction.
RLK_HD Quad canonical_product(const Quad& a) {
#if defined(__CUDA_ARCH__)
  return quad_of<Quad>([&](int i) { return float_of(min(bits_of(a.v[i]), bits_of(canonical_nan()))); });
#else
  return select(is_nan(a), broadcast<Quad>(canonical_nan()), a);
#endif
}

// In place of the templates of token_terms.h: one instruction, where a comparison and a choice are two. The sign of a zero
// differs where a bound is a zero of the other sign, which no caller's result shows.
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
RLK_HD Quad min_of(const Quad& a, const Quad& b) {
  return quad_of<Quad>([&](int i) { return min_or_nan(a.v[i], b.v[i]); });
}
RLK_HD Quad max_of(const Quad& a, const Quad& b) {
  return quad_of<Quad>([&](int i) { return max_or_nan(a.v[i], b.v[i]); });
}
// Where low <= high: x is inside if it is what is left of it between them, which is known already, so this is two instructions.
RLK_HD Quad inside_or(const Quad& x, float low, float high, const Quad& value, const Quad& outside) {
  return quad_of<Quad>([&](int i) {
    const float left = min_or_nan(max_or_nan(x.v[i], low), high);
    return left < x.v[i] || left > x.v[i] ? outside.v[i] : value.v[i];
  });
}
#endif

RLK_HD QuadBits bits_of(const Quad& a) {
  return quad_of<QuadBits>([&](int i) { return bits_of(a.v[i]); });
}
RLK_HD Quad float_of(const QuadBits& a) {
  return quad_of<Quad>([&](int i) { return float_of(a.v[i]); });
}
// Sums and differences wrap around.
RLK_HD std::int32_t wrapped_sum(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
}
RLK_HD std::int32_t wrapped_difference(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) - static_cast<std::uint32_t>(b));
}
RLK_HD QuadBits operator+(const QuadBits& a, const QuadBits& b) {
  return quad_of<QuadBits>([&](int i) { return wrapped_sum(a.v[i], b.v[i]); });
}
RLK_HD QuadBits operator-(const QuadBits& a, const QuadBits& b) {
  return quad_of<QuadBits>([&](int i) { return wrapped_difference(a.v[i], b.v[i]); });
}
RLK_HD QuadBits operator+(const QuadBits& a, std::int32_t b) {
  return quad_of<QuadBits>([&](int i) { return wrapped_sum(a.v[i], b); });
}
RLK_HD QuadBits operator-(const QuadBits& a, std::int32_t b) {
  return quad_of<QuadBits>([&](int i) { return wrapped_difference(a.v[i], b); });
}
RLK_HD QuadBits operator<<(const QuadBits& a, int n) {
  return quad_of<QuadBits>([&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) << n); });
}
RLK_HD QuadBits operator>>(const QuadBits& a, int n) {  // arithmetic
  return quad_of<QuadBits>([&](int i) { return a.v[i] >> n; });
}

}  // namespace rlk
