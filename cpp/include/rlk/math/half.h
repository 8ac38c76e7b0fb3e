// bfloat16 and binary16 as raw bits: exact widening to fp32 and correctly rounded narrowing, for host, CUDA and HIP.
//
//   float_of_bf16, float_of_f16   exact; subnormals, signed zeros and Inf included. NaN stays NaN, its payload is
//                                 unspecified (the CUDA conversion of binary16 need not keep it).
//   bf16_rn, f16_rn               round to nearest, ties to even; overflow to Inf; subnormal results are rounded once
//   bf16_rd                       toward -Inf: never above the input
//   bf16_rn2, f16_rn2             two values packed, `low` in bits 0..15
// A NaN of either sign narrows to 0x7fff, as with cvt.rn.bf16.f32 and cvt.rn.f16.f32 on NVIDIA. PyTorch's NaN on the
// host is 0x7fc0.
// A flush-to-zero mode changes no result, because no result depends on an fp32 subnormal, neither as an operand nor as
// an intermediate value.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/math/ieee.h"

namespace rlk {

constexpr std::uint16_t kHalfNan = 0x7fff;  // a NaN in bfloat16 and in float16

RLK_HD float float_of_bf16(std::uint16_t h) { return float_of(static_cast<std::int32_t>(std::uint32_t{h} << 16)); }

RLK_HD float float_of_f16(std::uint16_t h) {
#if defined(__CUDA_ARCH__)
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
#else
  const std::uint32_t sign = (std::uint32_t{h} & 0x8000u) << 16;
  const std::uint32_t shifted = (std::uint32_t{h} & 0x7fffu) << 13;  // exponent and significand in fp32's positions
  // Adding 112 = 127 - 15 converts the exponent's bias; a second 112 turns exponent 31 into 255.
  const std::uint32_t normal = shifted + (112u << 23) + (shifted >= (0x7c00u << 13) ? (112u << 23) : 0u);
  // Subnormal: significand s read as 2^-14 * (1 + s / 2^10), minus 2^-14; both numbers are normal in fp32, so the
  // subtraction is exact.
  const float subnormal = sub_rn(float_of(static_cast<std::int32_t>(shifted + (113u << 23))), float_of(113 << 23));
  const std::uint32_t magnitude = shifted < (0x0400u << 13) ? static_cast<std::uint32_t>(bits_of(subnormal)) : normal;
  return float_of(static_cast<std::int32_t>(sign | magnitude));
#endif
}

RLK_HD std::uint16_t bf16_rn(float f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
#else
  const std::uint32_t b = static_cast<std::uint32_t>(bits_of(f));
  const std::uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;  // a carry out of the significand rightly
                                                                         // raises the exponent
  return static_cast<std::uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? kHalfNan : rounded);
#endif
}

RLK_HD std::uint16_t bf16_rd(float f) {
  const std::uint32_t b = static_cast<std::uint32_t>(bits_of(f));
  const std::uint32_t away = (b >> 31) ? 0xffffu : 0u;  // a negative value grows in magnitude, a positive value is
                                                        // truncated
  const std::uint32_t rounded = (b + away) >> 16;
  return static_cast<std::uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? kHalfNan : rounded);
}

RLK_HD std::uint16_t f16_rn(float f) {
#if defined(__CUDA_ARCH__)
  std::uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
#else
  const std::uint32_t b = static_cast<std::uint32_t>(bits_of(f));
  const std::uint32_t magnitude = b & 0x7fffffffu;
  // Normal: converts the exponent's bias and rounds off the 13 low bits; everything from 65520 on rounds to Inf.
  const std::uint32_t rebased = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t normal = magnitude >= 0x47800000u ? 0x7c00u : rebased;
  // Below 2^-14: the last bit of an fp32 in [0.5, 1) is 2^-24, the unit of binary16's subnormals. So adding 0.5 rounds
  // to this unit.
  const std::uint32_t subnormal =
      static_cast<std::uint32_t>(bits_of(add_rn(float_of(static_cast<std::int32_t>(magnitude)), 0.5f))) - (126u << 23);
  const std::uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const std::uint32_t sign = (b >> 16) & 0x8000u;
  return static_cast<std::uint16_t>(magnitude > 0x7f800000u ? kHalfNan : (sign | finite));
#endif
}

RLK_HD std::uint32_t bf16_rn2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));  // the first source gives the upper half
  return pair;
#else
  return std::uint32_t{bf16_rn(low)} | (std::uint32_t{bf16_rn(high)} << 16);
#endif
}

RLK_HD std::uint32_t f16_rn2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return std::uint32_t{f16_rn(low)} | (std::uint32_t{f16_rn(high)} << 16);
#endif
}

}  // namespace rlk
