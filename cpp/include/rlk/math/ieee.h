// IEEE fp32 primitives that no compiler may contract, reassociate or flush, for host, CUDA and HIP.
//
// Every formula of math/ is built from these functions alone, so it gives the same bits everywhere. A formula that is a
// template on F also runs on the vector types of cpu/simd.h, for which the same functions exist.
#pragma once

#include <cstdint>
#include <cstring>

#include "rlk/base.h"

#if !defined(__CUDA_ARCH__) && !defined(__HIP_DEVICE_COMPILE__)
#include <cmath>
#endif

namespace rlk {

#if defined(__CUDA_ARCH__)
RLK_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
RLK_HD float sub_rn(float a, float b) { return __fsub_rn(a, b); }
RLK_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
RLK_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
RLK_HD float sqrt_rn(float a) { return __fsqrt_rn(a); }
RLK_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
RLK_HD std::int32_t bits_of(float a) { return __float_as_int(a); }
RLK_HD float float_of(std::int32_t b) { return __int_as_float(b); }
#else
// The host compiles with -ffp-contract=off; __builtin_fmaf rounds once on every target.
RLK_HD float add_rn(float a, float b) { return a + b; }
RLK_HD float sub_rn(float a, float b) { return a - b; }
RLK_HD float mul_rn(float a, float b) { return a * b; }
RLK_HD float div_rn(float a, float b) { return a / b; }
RLK_HD float sqrt_rn(float a) { return __builtin_sqrtf(a); }
RLK_HD float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#if defined(__has_builtin) && __has_builtin(__builtin_bit_cast)
RLK_HD std::int32_t bits_of(float a) { return __builtin_bit_cast(std::int32_t, a); }
RLK_HD float float_of(std::int32_t b) { return __builtin_bit_cast(float, b); }
#else  // for g++ 10, which compiles the wheels
RLK_HD std::int32_t bits_of(float a) {
  std::int32_t b;
  __builtin_memcpy(&b, &a, sizeof b);
  return b;
}
RLK_HD float float_of(std::int32_t b) {
  float a;
  __builtin_memcpy(&a, &b, sizeof a);
  return a;
}
#endif
#endif

RLK_HD float select(bool condition, float yes, float no) { return condition ? yes : no; }
RLK_HD std::int32_t select(bool condition, std::int32_t yes, std::int32_t no) { return condition ? yes : no; }
#if defined(__CUDA_ARCH__)
RLK_HD float abs_of(float a) { return fabsf(a); }  // costs no instruction: it becomes a modifier of an operand
#else
RLK_HD float abs_of(float a) { return float_of(bits_of(a) & 0x7fffffff); }
#endif
RLK_HD float copysign_of(float magnitude, float sign) {
  return float_of((bits_of(magnitude) & 0x7fffffff) | (bits_of(sign) & static_cast<std::int32_t>(0x80000000u)));
}
RLK_HD float ceil_of(float a) { return __builtin_ceilf(a); }

// n / d, correctly rounded, from a reciprocal of d with a relative error of at most 2^-23. One Newton step corrects the
// reciprocal. A second step corrects the quotient from its remainder, which is exact. d lies in [1, 2^64]. The
// numerator is a power of two no larger than d, or it is e where d = fl(1 + e). The test of math/ tries every
// significand of d with every such reciprocal.
// For d = 2^k (2 - 2^-23) the reciprocal must be at least 1 / d. This is true of the reciprocals that the supported
// GPUs compute.
RLK_HD float quotient_of(float n, float d, float reciprocal) {
  const float r = fma_rn(reciprocal, fma_rn(-d, reciprocal, 1.0f), reciprocal);
  const float q = mul_rn(n, r);
  return fma_rn(fma_rn(-d, q, n), r, q);
}
// n / d for the arguments of quotient_of, with the same bits on every backend. On CUDA it leaves out __fdiv_rn's tests
// for the ends of the range and its slow path.
RLK_HD float div_in_range(float n, float d) {
#if defined(__CUDA_ARCH__)
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(d));
  return quotient_of(n, d, reciprocal);
#else
  return div_rn(n, d);
#endif
}

// n / d, correctly rounded, by a single Newton step. This function needs two instructions fewer than quotient_of. It is
// used only for d = fl(1 + e) and the n that sigmoid_of_half passes; for other arguments it may be wrong. The test of
// math/ tries every argument of sigmoid_of_half with every reciprocal that quotient_of allows.
RLK_HD float short_quotient_of(float n, float d, float reciprocal) {
#if defined(__CUDA_ARCH__)
  float q;  // the .ftz instructions below read a subnormal n as +0
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"(n), "f"(reciprocal));
  float rest;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(rest) : "f"(-d), "f"(q), "f"(n));
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(q) : "f"(rest), "f"(reciprocal), "f"(q));
  return q;
#else
  const float read = abs_of(n) < 0x1p-126f ? 0.0f : n, q = mul_rn(read, reciprocal);
  return fma_rn(fma_rn(-d, q, read), reciprocal, q);
#endif
}

// A constant as a value of type F, which may be a vector: broadcast<F>(1.0f).
template <class F>
RLK_HD F broadcast(float a) {
  return F{} + a;
}
template <>
RLK_HD float broadcast<float>(float a) {
  return a;
}

RLK_HD float infinity() { return float_of(0x7f800000); }
RLK_HD float canonical_nan() { return float_of(0x7fc00000); }
RLK_HD bool is_nan(float a) { return (bits_of(a) & 0x7fffffff) > 0x7f800000; }

constexpr float kLog2e = 0x1.715476p+0f;  // fl32(log2 e)
constexpr float kLn2 = 0x1.62e430p-1f;    // fl32(ln 2)

// The same constants as sums of two terms. kLn2High has 16 significand bits: its product with an integer below 2^8 is
// exact.
constexpr float kLog2eLow = 0x1.4ae0cp-26f;  // fl32(log2 e - kLog2e)
constexpr float kLn2High = 0x1.62e4p-1f;
constexpr float kLn2Low = 0x1.7f7d1cp-20f;  // fl32(ln 2 - kLn2High)

}  // namespace rlk
