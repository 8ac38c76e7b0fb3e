// Steps of the matrix units of math/mma_model.h over a panel, with outputs in lanes.
//
// NVIDIA's units and CDNA3 align the products of a group to its largest exponent. The exponents of a panel's operands
// are computed once. One fp32 multiplication gives the product of two operands. A second multiplication by a power of
// two scales the last kept bit to 1, and the conversion to an integer cuts the lower bits. This is exact while the
// exponent of the group lies in [kLeastExponent, kLargestExponent], since fp32 then rounds only products below the last
// kept bit. If a lane has an exponent outside this range, or an Inf or NaN, the model itself computes the lane, one
// group at a time. CDNA2 adds in fp32 and flushes results.
#pragma once

#include "linear_simd.h"
#include "rlk/math/mma_model.h"
#include "simd.h"

namespace rlk::cpu::RLK_CPU_ISA {

constexpr int kTileColumns = 2 * kLanes;

constexpr std::int32_t kLeastExponent = -90, kLargestExponent = 100;
// 16-bit values that replace the exponents of zeros, Infs and NaNs. A product with a zero then has a sum of exponents
// far below the exponents of other products. A product with an Inf or NaN has a sum far above them, even if the other
// factor is zero.
constexpr std::int32_t kZeroExponent = -8000, kSpecialExponent = 16000;
constexpr std::int32_t kNoProduct = kZeroExponent / 2;  // below this, a group's products are all zero

using Shorts = Vector<std::int16_t>;

RLK_HD Ints larger(Ints a, Ints b) { return {a.v > b.v ? a.v : b.v}; }
RLK_HD Ints smaller(Ints a, Ints b) { return {a.v < b.v ? a.v : b.v}; }
RLK_HD Ints shifted_right(Ints a, Ints n) { return {a.v >> n.v}; }
RLK_HD Ints shifted_left(Ints a, Ints n) { return ints_of(unsigned_of(a) << unsigned_of(n)); }
RLK_HD Ints exponent_field(Floats a) { return (bits_of(a) >> 23) & 0xff; }
RLK_HD Floats power_of_two(Ints exponent) { return float_of((exponent + 127) << 23); }  // for normal numbers only

// The model's exponent of an operand that was widened to fp32. For a binary16 subnormal the model's exponent is -14,
// which is larger than the exponent of the widened number.
RLK_HD Ints operand_exponent(Floats x, DType dtype) {
  const Ints field = exponent_field(x);
  const Ints finite = larger(field - 127, splat(dtype == DType::kBFloat16 ? -126 : -14));
  const Ints known = select(field == 255, splat(kSpecialExponent), finite);
  return select((bits_of(x) & 0x7fffffff) == 0, splat(kZeroExponent), known);
}

// The 16 bits of a widened operand.
RLK_HD std::uint16_t half_of(float x, DType dtype) {
  return dtype == DType::kBFloat16 ? static_cast<std::uint16_t>(static_cast<std::uint32_t>(rlk::bits_of(x)) >> 16)
                                   : f16_rn(x);
}

// Rounds toward zero. The result is wrong for numbers above 2^31 - 128, which `too_large` finds.
RLK_HD Floats truncated_to_floats(Ints a) {
#if defined(__AVX512F__)
  return {(Vector<float>)_mm512_cvt_roundepi32_ps((__m512i)a.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)};
#else
  const Floats f = to_floats(a);
  const auto back = to_ints(f).v;
  const Vector<std::int32_t> away = a.v < 0 ? back < a.v : back > a.v;
  return float_of(ints_of((Vector<std::uint32_t>)bits_of(f).v + (Vector<std::uint32_t>)away));
#endif
}
RLK_HD Mask too_large(Ints a) { return a > 0x7fffff00; }

struct Sm90Mma {
  static constexpr int kProducts = 16, kFractionBits = 25;
  static constexpr bool kSumsAccumulator = true;
  static RLK_HD float group(float c, const std::uint16_t* a, const std::uint16_t* b, DType t) {
    return nvidia_mma_group<16>(kSm90MmaRule, c, a, b, t);
  }
};
struct Sm80Mma {
  static constexpr int kProducts = 8, kFractionBits = 24;
  static constexpr bool kSumsAccumulator = true;
  static RLK_HD float group(float c, const std::uint16_t* a, const std::uint16_t* b, DType t) {
    return nvidia_mma_group<8>(kSm80MmaRule, c, a, b, t);
  }
};
struct Gfx942Mma {
  static constexpr int kProducts = 8, kFractionBits = 24;
  static constexpr bool kSumsAccumulator = false;
  static RLK_HD float group(float c, const std::uint16_t* a, const std::uint16_t* b, DType t) {
    return gfx942_mma_group(c, a, b, t);
  }
};

// Replaces the sums of the marked lanes by the model's results. `b` is one column block of the panel.
template <class Unit>
__attribute__((noinline)) void group_by_model(Floats* sum, unsigned lanes, const float* a, const float* b,
                                              DType dtype) {
  float c[kLanes];
  std::memcpy(c, sum, sizeof c);
  std::uint16_t x[Unit::kProducts], y[Unit::kProducts];
  for (int k = 0; k < Unit::kProducts; ++k) x[k] = half_of(a[k], dtype);
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    for (int k = 0; k < Unit::kProducts; ++k) y[k] = half_of(b[k * kTileColumns + lane], dtype);
    c[lane] = Unit::group(c[lane], x, y, dtype);
  }
  std::memcpy(sum, c, sizeof c);
}

// The last steps of CDNA3. The products' sum, in units of 2^(largest - 24), and the accumulator are cut downward, added
// in units of 2^(both - 31), and rounded. `small` marks lanes where the accumulator is subnormal.
RLK_HD Floats add_accumulator(Ints products, Ints largest, Floats c, Ints both, Mask* small) {
  const Ints field = exponent_field(c), fraction = bits_of(c) & 0x7fffff;
  *small = *small | (Mask{field.v == 0} & (fraction != splat(0)));
  const Ints magnitude = select(field == 0, splat(0), (fraction | 0x800000) << 1);
  const Ints value = select(bits_of(c) < 0, splat(0) - magnitude, magnitude);
  const Ints drop = smaller(both - largest, splat(62));
  const Ints upper =
      shifted_right(value, smaller(both - field + 127, splat(31))) + shifted_right(products, smaller(drop, splat(31)));
  // The seven lowest bits of products * 2^7 >> drop, which lie below the unit of `upper`, 2^(both - 24).
  const Ints kept = shifted_right(products, larger(smaller(drop - 7, splat(31)), splat(0)));
  const Ints lower = shifted_left(kept, larger(splat(7) - drop, splat(0))) & 127;
  // If |upper| < 2^24, `upper` and `lower` fit one integer. Otherwise `sticky` is converted to fp32. Its lowest bit
  // stands for the seven bits of `lower`: it is set if any of them is set. That is enough, since the conversion rounds
  // off at least two bits of `sticky`.
  const Mask fits = (upper >= -(1 << 24)) & (upper < (1 << 24));
  const Ints all = (upper << 7) | lower;
  const Ints sticky = (upper << 1) | select(lower == 0, splat(0), splat(1));
  const Floats f = to_floats(select(fits, all, sticky));
  return mul_rn(f, power_of_two(both - select(fits, splat(31), splat(25))));
}

// sums += eight products, each cut to a multiple of 1 / scale.
RLK_HD void add_products(Ints sums[2], const Floats scale[2], const float* a, const float* b) {
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    const Floats x = broadcast<Floats>(a[k]);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const Floats product = mul_rn(x, load_bytes<Floats>(b + k * kTileColumns + v * kLanes));
      sums[v] = sums[v] + to_ints(mul_rn(product, scale[v]));
    }
  }
}

// One group of products for one row and kTileColumns columns.
template <class Unit>
RLK_HD void aligned_group(Floats sums[2], const float* a, const std::int32_t* a_exponents, const float* b,
                          const std::int32_t* b_exponents, DType dtype) {
  Shorts most = (Shorts)splat(a_exponents[0]).v + load_bytes<Shorts>(b_exponents);
#pragma GCC unroll 16
  for (int k = 1; k < Unit::kProducts; ++k) {
    const Shorts e = (Shorts)splat(a_exponents[k]).v + load_bytes<Shorts>(b_exponents + k * kLanes);
    most = most > e ? most : e;
  }
  const Ints both_halves = {(Vector<std::int32_t>)most};
  Ints products[2] = {(both_halves << 16) >> 16, both_halves >> 16};

  Ints reference[2];
  Floats scale[2];
  Ints low[2], high[2] = {splat(0), splat(0)};  // sums of eight products are below 2^30 and fit
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const Ints c_exponent = exponent_field(sums[v]) - 127;
    reference[v] = Unit::kSumsAccumulator ? larger(products[v], c_exponent) : products[v];
    scale[v] = power_of_two(splat(Unit::kFractionBits) - reference[v]);
    low[v] = Unit::kSumsAccumulator ? to_ints(mul_rn(sums[v], scale[v])) : splat(0);
  }
  add_products(low, scale, a, b);
  if constexpr (Unit::kProducts == 16) add_products(high, scale, a + 8, b + 8 * kTileColumns);
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const Floats c = sums[v];
    const Ints c_exponent = exponent_field(c) - 127;
    Mask outside = reference[v] < kLeastExponent;
    Mask above = (reference[v] > kLargestExponent) | (c_exponent > kLargestExponent);
    Floats sum;
    if constexpr (Unit::kSumsAccumulator) {
      const Ints total = low[v] + high[v];
      if constexpr (Unit::kProducts == 16) {
        // Marks the sums that exceed 32 bits.
        outside = outside | Mask{((low[v].v ^ total.v) & (high[v].v ^ total.v)) < 0};
#if !defined(__AVX512F__)
        outside = outside | too_large(total);
#endif
      }
      sum = mul_rn(truncated_to_floats(total), power_of_two(reference[v] - Unit::kFractionBits));
    } else {
      const Ints both = larger(reference[v], larger(c_exponent, splat(-126)));
      sum = add_accumulator(low[v], reference[v], c, both, &outside);
    }
    const Mask none = products[v] < kNoProduct;
    sums[v] = select(none, add_rn(c, broadcast<Floats>(0.0f)), sum);
    const unsigned lanes = lanes_of(above | (outside & ~none));
    if (__builtin_expect(lanes != 0, 0)) {
      Floats redone = c;
      group_by_model<Unit>(&redone, lanes, a, b + v * kLanes, dtype);
      sums[v] = select(mask_of(lanes), redone, sums[v]);
    }
  }
}

// Stores the sums of a gfx unit's steps; a zero sum becomes +0.
RLK_HD void store_gfx(float* out, const Floats sums[2]) {
  store_bytes(out, add_rn(sums[0], broadcast<Floats>(0.0f)));
  store_bytes(out + kLanes, add_rn(sums[1], broadcast<Floats>(0.0f)));
}

template <class Unit>
RLK_HD void multiply_aligned(const LinearTile& t) {
  for (std::int64_t row = 0; row < t.rows; ++row) {
    const float* a = t.a + row * kPanelStride;
    const std::int32_t* a_exponents = t.a_exponents + row * kPanelStride;
    float* out = t.sums + row * t.sums_stride;
    Floats sums[2] = {load_bytes<Floats>(out), load_bytes<Floats>(out + kLanes)};
    for (int k = 0; k < t.k; k += Unit::kProducts) {
      aligned_group<Unit>(sums, a + k, a_exponents + k, t.b + k * kTileColumns, t.b_exponents + k * kLanes,
                          t.unit.dtype);
    }
    if constexpr (Unit::kSumsAccumulator) {
      store_bytes(out, sums[0]);
      store_bytes(out + kLanes, sums[1]);
    } else {
      store_gfx(out, sums);
    }
  }
}

// Subnormals become zeros with the same sign.
RLK_HD Floats gfx90a_flush(Floats x) {
#if defined(__AVX512DQ__)
  constexpr int kSubnormal = 0x20;
  const __mmask16 small = _mm512_fpclass_ps_mask((__m512)x.v, kSubnormal);
  return {(Vector<float>)_mm512_mask_and_ps((__m512)x.v, small, (__m512)x.v, _mm512_set1_ps(-0.0f))};
#else
  const Ints magnitude = bits_of(x) & 0x7fffffff;
  return float_of(bits_of(x) & ~(Ints{(magnitude < 0x00800000).v} & 0x7fffffff));
#endif
}

RLK_HD void multiply_gfx90a(const LinearTile& t) {
  const Floats zero = broadcast<Floats>(0.0f);
  for (std::int64_t row = 0; row < t.rows; ++row) {
    const float* a = t.a + row * kPanelStride;
    float* out = t.sums + row * t.sums_stride;
    Floats sums[2] = {load_bytes<Floats>(out), load_bytes<Floats>(out + kLanes)};
    for (int k = 0; k < t.k; k += kMmaStepK) {
      for (int v = 0; v < 2; ++v) {
        const float* y = t.b + k * kTileColumns + v * kLanes;
        Floats sum = select(abs_of(sums[v]) < broadcast<Floats>(0x1p-126f), zero, sums[v]);
        for (int i = 0; i < kMmaStepK; i += 4) {
          Floats product[4];
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const Floats factor = load_bytes<Floats>(y + (i + j) * kTileColumns);
            product[j] = gfx90a_flush(fma_rn(broadcast<Floats>(a[k + i + j]), factor, zero));
          }
          const Floats low = gfx90a_flush(add_rn(product[0], product[1]));
          const Floats high = gfx90a_flush(add_rn(product[2], product[3]));
          sum = gfx90a_flush(add_rn(sum, gfx90a_flush(add_rn(low, high))));
        }
        sums[v] = sum;
      }
    }
    store_gfx(out, sums);
  }
}

}  // namespace rlk::cpu::RLK_CPU_ISA
