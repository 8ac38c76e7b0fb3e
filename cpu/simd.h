// Vectors of floats for files that CMake compiles once per instruction set. The vectors have the functions of
// math/ieee.h, so the templates of math/ run on them.
//
// Each of these files defines RLK_CPU_ISA (baseline, avx2, avx512), and its code is in namespace rlk::cpu::RLK_CPU_ISA.
// It must not emit an inline function that another file may also emit. The linker keeps one copy of such a function,
// and this copy might run on a CPU that lacks its instructions. Hence RLK_HD is always_inline in these files
// (rlk/base.h), and the files use no std container. The build checks their objects (cmake/CheckSimdCode.cmake).
#pragma once

#ifndef RLK_CPU_ISA
#error "RLK_CPU_ISA names the instruction set this file is compiled for"
#endif

#include <cstdint>
#include <cstring>

#include "rlk/base.h"
#include "rlk/math/half.h"
#include "rlk/math/ieee.h"

#if defined(__AVX2__)
#pragma GCC diagnostic push  // GCC 12 warns about its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace rlk::cpu::RLK_CPU_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

template <class T, int kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class T, int kBytes = 4 * kLanes>
using Vector = typename VectorOf<T, kBytes>::Type;

// Each lane is all ones or all zeros.
struct Mask {
  Vector<std::int32_t> v;
};
struct Ints {
  Vector<std::int32_t> v;
};
struct Floats {
  Vector<float> v;
};

}  // namespace rlk::cpu::RLK_CPU_ISA

namespace rlk {

// a - 0 keeps the sign of a zero; 0 + a would lose it.
template <>
RLK_HD cpu::RLK_CPU_ISA::Floats broadcast<cpu::RLK_CPU_ISA::Floats>(float a) {
  return {a - cpu::RLK_CPU_ISA::Vector<float>{}};
}

}  // namespace rlk

namespace rlk::cpu::RLK_CPU_ISA {

RLK_HD Mask operator&(Mask a, Mask b) { return {a.v & b.v}; }
RLK_HD Mask operator|(Mask a, Mask b) { return {a.v | b.v}; }
RLK_HD Mask operator~(Mask a) { return {~a.v}; }

// Sums and differences wrap around.
RLK_HD Vector<std::uint32_t> unsigned_of(Ints a) { return (Vector<std::uint32_t>)a.v; }
RLK_HD Ints ints_of(Vector<std::uint32_t> a) { return {(Vector<std::int32_t>)a}; }
RLK_HD Ints operator+(Ints a, Ints b) { return ints_of(unsigned_of(a) + unsigned_of(b)); }
RLK_HD Ints operator-(Ints a, Ints b) { return ints_of(unsigned_of(a) - unsigned_of(b)); }
RLK_HD Ints operator+(Ints a, std::int32_t b) { return ints_of(unsigned_of(a) + static_cast<std::uint32_t>(b)); }
RLK_HD Ints operator-(Ints a, std::int32_t b) { return ints_of(unsigned_of(a) - static_cast<std::uint32_t>(b)); }
RLK_HD Ints operator&(Ints a, Ints b) { return {a.v & b.v}; }
RLK_HD Ints operator|(Ints a, Ints b) { return {a.v | b.v}; }
RLK_HD Ints operator~(Ints a) { return {~a.v}; }
RLK_HD Ints operator&(Ints a, std::int32_t b) { return {a.v & b}; }
RLK_HD Ints operator|(Ints a, std::int32_t b) { return {a.v | b}; }
RLK_HD Ints operator<<(Ints a, int n) { return {a.v << n}; }
RLK_HD Ints operator>>(Ints a, int n) { return {a.v >> n}; }  // arithmetic shift
RLK_HD Mask operator==(Ints a, std::int32_t b) { return {a.v == b}; }
RLK_HD Mask operator!=(Ints a, Ints b) { return {a.v != b.v}; }
RLK_HD Mask operator<(Ints a, std::int32_t b) { return {a.v < b}; }
RLK_HD Mask operator>(Ints a, std::int32_t b) { return {a.v > b}; }
RLK_HD Mask operator>=(Ints a, std::int32_t b) { return {a.v >= b}; }

RLK_HD Floats operator-(Floats a) { return {-a.v}; }
RLK_HD Mask operator<(Floats a, Floats b) { return {a.v < b.v}; }
RLK_HD Mask operator<=(Floats a, Floats b) { return {a.v <= b.v}; }
RLK_HD Mask operator>(Floats a, Floats b) { return {a.v > b.v}; }
RLK_HD Mask operator>=(Floats a, Floats b) { return {a.v >= b.v}; }
RLK_HD Mask operator==(Floats a, Floats b) { return {a.v == b.v}; }

RLK_HD Floats add_rn(Floats a, Floats b) { return {a.v + b.v}; }
RLK_HD Floats sub_rn(Floats a, Floats b) { return {a.v - b.v}; }
RLK_HD Floats mul_rn(Floats a, Floats b) { return {a.v * b.v}; }
RLK_HD Floats div_rn(Floats a, Floats b) { return {a.v / b.v}; }
RLK_HD Floats div_in_range(Floats a, Floats b) { return {a.v / b.v}; }
RLK_HD Floats fma_rn(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return {(Vector<float>)_mm512_fmadd_ps((__m512)a.v, (__m512)b.v, (__m512)c.v)};
#elif defined(__FMA__)
  return {(Vector<float>)_mm256_fmadd_ps((__m256)a.v, (__m256)b.v, (__m256)c.v)};
#else
  Floats r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
#endif
}
RLK_HD Floats ceil_of(Floats a) {
#if defined(__AVX512F__)
  return {(Vector<float>)_mm512_roundscale_ps((__m512)a.v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)};
#elif defined(__AVX2__)
  return {(Vector<float>)_mm256_ceil_ps((__m256)a.v)};
#else
  for (int i = 0; i < kLanes; ++i) a.v[i] = __builtin_ceilf(a.v[i]);
  return a;
#endif
}

RLK_HD Ints bits_of(Floats a) { return {(Vector<std::int32_t>)a.v}; }
RLK_HD Floats float_of(Ints a) { return {(Vector<float>)a.v}; }
RLK_HD Floats to_floats(Ints a) { return {__builtin_convertvector(a.v, Vector<float>)}; }
RLK_HD Ints to_ints(Floats a) { return {__builtin_convertvector(a.v, Vector<std::int32_t>)}; }  // rounds toward zero

RLK_HD Floats select(Mask condition, Floats yes, Floats no) { return {condition.v ? yes.v : no.v}; }
RLK_HD Ints select(Mask condition, Ints yes, Ints no) { return {condition.v ? yes.v : no.v}; }
RLK_HD Floats abs_of(Floats a) { return float_of(bits_of(a) & 0x7fffffff); }
RLK_HD Floats copysign_of(Floats magnitude, Floats sign) {
  return float_of((bits_of(magnitude) & 0x7fffffff) | (bits_of(sign) & static_cast<std::int32_t>(0x80000000u)));
}
RLK_HD Mask is_nan(Floats a) { return {a.v != a.v}; }

RLK_HD Ints splat(std::int32_t a) { return {a - Vector<std::int32_t>{}}; }

// A bit for each lane: bit i is set if lane i is true.
RLK_HD unsigned lanes_of(Mask a) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)a.v);
#elif defined(__AVX2__)
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)a.v));
#else
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= (static_cast<unsigned>(a.v[i]) & 1u) << i;
  return bits;
#endif
}
RLK_HD bool any_of(Mask a) { return lanes_of(a) != 0; }
RLK_HD Mask mask_of(unsigned bits) {
#if defined(__AVX512DQ__)
  return {(Vector<std::int32_t>)_mm512_movm_epi32(static_cast<__mmask16>(bits))};
#else
  constexpr Vector<std::int32_t> kBit = {1, 2, 4, 8, 16, 32, 64, 128};
  return {(static_cast<std::int32_t>(bits) & kBit) != 0};
#endif
}

// Access to memory at any alignment.
template <class V>
RLK_HD V load_bytes(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
RLK_HD void store_bytes(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// Element types in memory. load and store move kLanes elements; store rounds to nearest even, and a NaN becomes the
// type's canonical NaN.
struct Fp32 {
  using Storage = float;
  static RLK_HD Floats load(const void* p) { return load_bytes<Floats>(p); }
  static RLK_HD void store(void* p, Floats a) {
    store_bytes(p, select(is_nan(a), broadcast<Floats>(canonical_nan()), a));
  }
};

struct Bf16 {
  using Storage = std::uint16_t;
  static RLK_HD Floats widen(Vector<std::uint16_t, 2 * kLanes> h) {
#if defined(__AVX512F__)
    return {(Vector<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16)};
#elif defined(__AVX2__)
    return {(Vector<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16)};
#else
    return {(Vector<float>)(__builtin_convertvector(h, Vector<std::uint32_t>) << 16)};
#endif
  }
  static RLK_HD Floats load(const void* p) { return widen(load_bytes<Vector<std::uint16_t, 2 * kLanes>>(p)); }
  static RLK_HD void store(void* p, Floats a) {
    const auto b = (Vector<std::uint32_t>)a.v;
    const auto rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    const Ints h = select(is_nan(a), splat(kHalfNan), Ints{(Vector<std::int32_t>)rounded});
#if defined(__AVX512F__)
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)h.v));
#elif defined(__AVX2__)
    const __m128i low = _mm256_castsi256_si128((__m256i)h.v), high = _mm256_extracti128_si256((__m256i)h.v, 1);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm_packus_epi32(low, high));
#else
    store_bytes(p, __builtin_convertvector(h.v, Vector<std::uint16_t, 2 * kLanes>));
#endif
  }
};

struct Fp16 {
  using Storage = std::uint16_t;
  static RLK_HD Floats widen(Vector<std::uint16_t, 2 * kLanes> h) {
#if defined(__AVX512F__)
    return {(Vector<float>)_mm512_cvtph_ps((__m256i)h)};
#elif defined(__F16C__)
    return {(Vector<float>)_mm256_cvtph_ps((__m128i)h)};
#else
    Floats r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = float_of_f16(h[i]);
    return r;
#endif
  }
  static RLK_HD Floats load(const void* p) { return widen(load_bytes<Vector<std::uint16_t, 2 * kLanes>>(p)); }
  static RLK_HD void store(void* p, Floats a) {
    // A NaN with every significand bit set narrows to 0x7fff.
    const Floats b = select(is_nan(a), broadcast<Floats>(rlk::float_of(0x7fffffff)), a);
#if defined(__AVX512F__)
    _mm256_storeu_si256(static_cast<__m256i*>(p),
                        _mm512_cvtps_ph((__m512)b.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm256_cvtps_ph((__m256)b.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    Vector<std::uint16_t, 2 * kLanes> h;
    for (int i = 0; i < kLanes; ++i) h[i] = f16_rn(b.v[i]);
    store_bytes(p, h);
#endif
  }
};

}  // namespace rlk::cpu::RLK_CPU_ISA
