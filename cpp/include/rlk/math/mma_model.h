// One multiply-accumulate step of each supported matrix unit, bit for bit, in integer arithmetic. This model is the
// reference for rk.arithmetic().
//
// Every unit forms exact products of bfloat16 or binary16 operands and adds them to an fp32 accumulator. Units differ
// in the number of products summed at once, in how aligned addends are cut, and in the last rounding.
//   sm_90         16 products and the accumulator at once; each addend cut toward zero to a multiple of 2^(e - 25);
//                 exact sum; rounded toward zero. e is the largest exponent of a nonzero addend, at least -133; zeros
//                 are ignored
//   sm_80, sm_89  the same with 24 fractional bits, 8 products at a time: k = 0..7, then 8..15
//   gfx942        8 products, each cut toward zero to 24 fractional bits of the largest product exponent, are summed.
//                 Their sum and the accumulator, cut downward to 31 and 24 fractional bits of the larger exponent, are
//                 added. The result is rounded to nearest even
//   gfx90a        4 products as ((0 + 1) + (2 + 3)), then + accumulator: fp32 operations rounded to nearest even,
//                 subnormal operands and results flushed to zero
// A zero sum of a gfx step is +0, since the kernels for gfx units add +0 to each dot product. Without this addition,
// the sign of an underflowed sum would depend on the instruction's shape. Instructions of gfx90a flush a zero or
// subnormal accumulator to +0 when they begin; with the instruction 32x32x8 a step has two instructions, so it flushes
// twice. "Exponent" means the value of the exponent field. A product's exponent is the sum of its operands' exponents,
// so its significand lies in [1, 4). A subnormal has the smallest normal exponent and a significand below 1.
// The ends of the range on sm_90: subnormal operands, accumulators and results count in full. A zero sum is +0, even if
// every addend is -0, and so is a negative sum that rounds to zero. A sum of magnitude 2^128 or more becomes Inf,
// although rounding is toward zero. Products beyond the fp32 range may cancel before the sum is compared with 2^128.
// Any NaN, 0 * Inf, and Inf of both signs among the addends give 0x7fffffff; Inf of one sign gives that Inf.
// Sources: arXiv:2511.10909 and arXiv:2512.07004, read as specifications. The least exponent -133 and the ends of the
// range were measured on an H200. The test on GPUs, test_models.cu, compares sm_90 with mma.sync and wgmma. The model
// of sm_80 takes the ends of the range from sm_90. The models of sm_80 and of the gfx units are not verified on
// hardware.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/math/half.h"
#include "rlk/math/ieee.h"

namespace rlk {

enum class MmaUnit : std::uint8_t { kSm80, kSm90, kGfx90a, kGfx942 };

constexpr int kMmaStepK = 16;  // number of indices k in one step, for every unit

// A finite operand or accumulator: value = significand * 2^(exponent - fraction bits); the sign is separate.
struct MmaOperand {
  std::int32_t significand;  // >= 0; number of fraction bits: 10 for both 16-bit formats, 23 for fp32
  std::int32_t exponent;
  bool negative;
};

RLK_HD MmaOperand decode_half(std::uint16_t h, DType t) {
  const bool bf16 = t == DType::kBFloat16;
  const std::int32_t field = bf16 ? (h >> 7) & 0xff : (h >> 10) & 0x1f;
  const std::int32_t fraction = bf16 ? (h & 0x7f) << 3 : h & 0x3ff;
  return {fraction | (field != 0 ? 0x400 : 0), (field != 0 ? field : 1) - (bf16 ? 127 : 15), (h >> 15) != 0};
}

RLK_HD MmaOperand decode_float(float c) {
  const std::int32_t bits = bits_of(c), field = (bits >> 23) & 0xff;
  return {(bits & 0x7fffff) | (field != 0 ? 0x800000 : 0), (field != 0 ? field : 1) - 127, bits < 0};
}

RLK_HD std::int32_t half_infinity(DType t) { return t == DType::kBFloat16 ? 0x7f80 : 0x7c00; }

// Effect of Inf and NaN on c + sum a * b; kFinite if there is neither.
enum class MmaSpecial : std::uint8_t { kFinite, kPlusInf, kMinusInf, kNan };

RLK_HD MmaSpecial classify_mma(float c, const std::uint16_t* a, const std::uint16_t* b, int n, DType t) {
  const std::int32_t inf = half_infinity(t), c_magnitude = bits_of(c) & 0x7fffffff;
  bool nan = c_magnitude > 0x7f800000;
  bool plus = c_magnitude == 0x7f800000 && bits_of(c) > 0, minus = c_magnitude == 0x7f800000 && bits_of(c) < 0;
  for (int k = 0; k < n; ++k) {
    const std::int32_t x = a[k] & 0x7fff, y = b[k] & 0x7fff;
    if (x < inf && y < inf) continue;
    nan = nan || x > inf || y > inf || x == 0 || y == 0;
    const bool negative = ((a[k] ^ b[k]) & 0x8000) != 0;
    plus = plus || !negative;
    minus = minus || negative;
  }
  if (nan || (plus && minus)) return MmaSpecial::kNan;
  return plus ? MmaSpecial::kPlusInf : minus ? MmaSpecial::kMinusInf : MmaSpecial::kFinite;
}

RLK_HD float special_value(MmaSpecial s, std::int32_t nan_bits) {
  if (s == MmaSpecial::kNan) return float_of(nan_bits);
  return float_of(s == MmaSpecial::kPlusInf ? 0x7f800000 : static_cast<std::int32_t>(0xff800000u));
}

RLK_HD int bit_length(std::uint64_t m) {
#if defined(__CUDA_ARCH__)
  return 64 - __clzll(static_cast<long long>(m));
#else
  return m == 0 ? 0 : 64 - __builtin_clzll(m);
#endif
}

// magnitude * 2^exponent as fp32, subnormal results included; magnitude < 2^40. Overflow gives Inf with either
// rounding.
template <bool kNearestEven>
RLK_HD std::int32_t round_to_float(std::uint64_t magnitude, std::int32_t exponent) {
  if (magnitude == 0) return 0;
  const std::int32_t top = exponent + bit_length(magnitude) - 1;  // exponent of the value
  const std::int32_t unit = (top > -126 ? top : -126) - 23;       // exponent of the result's last bit
  const std::int32_t drop = unit - exponent;
  std::uint64_t kept = drop <= 0 ? magnitude << -drop : drop < 64 ? magnitude >> drop : 0;
  if (kNearestEven && drop > 0 && drop <= 40) {
    const std::uint64_t rest = magnitude & ((std::uint64_t{1} << drop) - 1), half = std::uint64_t{1} << (drop - 1);
    kept += rest > half || (rest == half && (kept & 1)) ? 1 : 0;
  }
  // `kept` has its hidden bit at 23 unless the result is subnormal. So adding the exponent field is right for normal
  // results, subnormal results and a carry into the next binade. At unit = -149 the hidden bit itself makes the field
  // 1; without it the field is 0.
  const std::int64_t bits = (static_cast<std::int64_t>(unit + 149) << 23) + static_cast<std::int64_t>(kept);
  return bits >= 0x7f800000 ? 0x7f800000 : static_cast<std::int32_t>(bits);
}

RLK_HD std::uint32_t cut_toward_zero(std::uint32_t magnitude, std::int32_t distance) {
  // Here magnitude < 2^31, and distance is negative only if magnitude is 0.
  return magnitude >> (distance < 0 ? 0 : distance < 31 ? distance : 31);
}
RLK_HD std::int64_t cut_downward(std::int64_t value, std::int32_t distance) {
  return value >> (distance < 62 ? distance : 62);
}

// Corner cases of the tensor-core rule. Each case is a measured fact about the instruction.
struct NvidiaMmaRule {
  int fraction_bits;          // fraction bits kept below the largest exponent
  int least_exponent;         // least exponent for alignment; only bfloat16 addends can all lie below this exponent
  bool zero_product_aligns;   // whether the largest exponent includes products with a zero operand
  bool overflow_is_infinite;  // false: overflow gives the largest finite number
  bool keeps_minus_zero;      // whether a sum of -0 alone is -0; every other zero sum is +0
  bool signs_underflow;       // whether a negative sum that is cut to zero is -0, not +0
};
constexpr NvidiaMmaRule kSm80MmaRule = {24, -133, false, true, false, false};
constexpr NvidiaMmaRule kSm90MmaRule = {25, -133, false, true, false, false};
constexpr std::int32_t kNvidiaNan = 0x7fffffff;

template <int kProducts>
RLK_HD float nvidia_mma_group(const NvidiaMmaRule& rule, float c, const std::uint16_t* a, const std::uint16_t* b,
                              DType t) {
  const MmaSpecial special = classify_mma(c, a, b, kProducts, t);
  if (special != MmaSpecial::kFinite) return special_value(special, kNvidiaNan);

  const MmaOperand acc = decode_float(c);
  std::int32_t product[kProducts], exponent[kProducts];
  std::int32_t largest = rule.least_exponent;
  if (acc.significand != 0 && acc.exponent > largest) largest = acc.exponent;
  bool all_minus_zero = acc.negative && acc.significand == 0;
  for (int k = 0; k < kProducts; ++k) {
    const MmaOperand x = decode_half(a[k], t), y = decode_half(b[k], t);
    const std::int32_t p = x.significand * y.significand;  // 20 fraction bits, below 2^22
    const bool negative = x.negative != y.negative;
    product[k] = negative ? -p : p;
    exponent[k] = x.exponent + y.exponent;
    if ((p != 0 || rule.zero_product_aligns) && exponent[k] > largest) largest = exponent[k];
    all_minus_zero = all_minus_zero && negative && p == 0;
  }

  const std::uint32_t c_cut =
      cut_toward_zero(static_cast<std::uint32_t>(acc.significand) << (rule.fraction_bits - 23), largest - acc.exponent);
  std::int64_t sum = acc.negative ? -static_cast<std::int64_t>(c_cut) : static_cast<std::int64_t>(c_cut);
  for (int k = 0; k < kProducts; ++k) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(product[k] < 0 ? -product[k] : product[k]);
    const std::uint32_t cut = cut_toward_zero(magnitude << (rule.fraction_bits - 20), largest - exponent[k]);
    sum += product[k] < 0 ? -static_cast<std::int64_t>(cut) : static_cast<std::int64_t>(cut);
  }
  const bool negative = sum < 0;
  std::int32_t bits =
      round_to_float<false>(static_cast<std::uint64_t>(negative ? -sum : sum), largest - rule.fraction_bits);
  if (bits == 0x7f800000 && !rule.overflow_is_infinite) bits = 0x7f7fffff;
  const bool sign = bits != 0  ? negative
                    : sum != 0 ? negative && rule.signs_underflow
                               : all_minus_zero && rule.keeps_minus_zero;
  return float_of(bits | (sign ? static_cast<std::int32_t>(0x80000000u) : 0));
}

// The sum of eight products on CDNA3. A product beyond fp32's range counts as Inf, as if each product had fp32's range
// of exponents.
RLK_HD float gfx942_mma_group(float c, const std::uint16_t* a, const std::uint16_t* b, DType t) {
  constexpr int kProducts = 8;
  constexpr std::int32_t kNoExponent = -1024;
  const MmaSpecial special = classify_mma(c, a, b, kProducts, t);
  if (special != MmaSpecial::kFinite) return special_value(special, bits_of(canonical_nan()));

  std::int32_t product[kProducts], exponent[kProducts], largest = kNoExponent;
  bool plus = false, minus = false;
  for (int k = 0; k < kProducts; ++k) {
    const MmaOperand x = decode_half(a[k], t), y = decode_half(b[k], t);
    const std::int32_t p = x.significand * y.significand;
    const bool negative = x.negative != y.negative;
    product[k] = negative ? -p : p;
    exponent[k] = p != 0 ? x.exponent + y.exponent : kNoExponent;
    const bool infinite = p != 0 && exponent[k] + bit_length(static_cast<std::uint64_t>(p)) - 21 >= 128;
    plus = plus || (infinite && !negative);
    minus = minus || (infinite && negative);
    largest = exponent[k] > largest ? exponent[k] : largest;
  }
  if (plus || minus)
    return special_value(plus && minus ? MmaSpecial::kNan
                         : plus        ? MmaSpecial::kPlusInf
                                       : MmaSpecial::kMinusInf,
                         bits_of(canonical_nan()));

  std::int64_t products = 0;  // in units of 2^(largest - 24)
  for (int k = 0; k < kProducts; ++k) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(product[k] < 0 ? -product[k] : product[k]);
    const std::uint32_t cut = cut_toward_zero(magnitude << 4, largest - exponent[k]);
    products += product[k] < 0 ? -static_cast<std::int64_t>(cut) : static_cast<std::int64_t>(cut);
  }
  const MmaOperand acc = decode_float(c);
  const std::int64_t c_value = acc.negative ? -static_cast<std::int64_t>(acc.significand) : acc.significand;
  const std::int32_t both = largest > acc.exponent ? largest : acc.exponent;
  const std::int64_t sum = cut_downward(products * 128, both - largest)             // in units of 2^(both - 31)
                           + cut_downward(c_value * 2, both - acc.exponent) * 128;  // 24 bits are kept
  const bool negative = sum < 0;
  const std::int32_t bits = round_to_float<true>(static_cast<std::uint64_t>(negative ? -sum : sum), both - 31);
  return float_of(bits | (negative ? static_cast<std::int32_t>(0x80000000u) : 0));
}

// The sum of four products on CDNA2 in fp32 arithmetic. Subnormal operands are flushed to +0; subnormal results are
// flushed to zeros of their sign.
RLK_HD float gfx90a_flush(float x) { return abs_of(x) < 0x1p-126f ? copysign_of(0.0f, x) : x; }

RLK_HD float gfx90a_product(std::uint16_t a, std::uint16_t b, DType t) {
  const bool bf16 = t == DType::kBFloat16;
  const float least = bf16 ? 0x1p-126f : 0x1p-14f;  // least normal operand
  float x = bf16 ? float_of_bf16(a) : float_of_f16(a), y = bf16 ? float_of_bf16(b) : float_of_f16(b);
  x = abs_of(x) < least ? 0.0f : x;
  y = abs_of(y) < least ? 0.0f : y;
  return gfx90a_flush(fma_rn(x, y, 0.0f));  // the added +0 turns a product of -0 into +0
}

RLK_HD float gfx90a_mma_group(float c, const std::uint16_t* a, const std::uint16_t* b, DType t) {
  const float low = gfx90a_flush(add_rn(gfx90a_product(a[0], b[0], t), gfx90a_product(a[1], b[1], t)));
  const float high = gfx90a_flush(add_rn(gfx90a_product(a[2], b[2], t), gfx90a_product(a[3], b[3], t)));
  const float sum = gfx90a_flush(add_rn(c, gfx90a_flush(add_rn(low, high))));
  return is_nan(sum) ? canonical_nan() : sum;
}

// d = c + sum of a[k] * b[k] over one k16 step, as the unit computes it. a and b hold 16 raw values of type t
// (kBFloat16 or kFloat16).
template <MmaUnit U>
RLK_HD float mma_step(float c, const std::uint16_t* a, const std::uint16_t* b, DType t) {
  if constexpr (U == MmaUnit::kSm90) {
    constexpr NvidiaMmaRule rule = kSm90MmaRule;  // a local copy, because device code cannot refer to the constant
    return nvidia_mma_group<16>(rule, c, a, b, t);
  } else if constexpr (U == MmaUnit::kSm80) {
    constexpr NvidiaMmaRule rule = kSm80MmaRule;
    return nvidia_mma_group<8>(rule, nvidia_mma_group<8>(rule, c, a, b, t), a + 8, b + 8, t);
  } else if constexpr (U == MmaUnit::kGfx942) {
    return add_rn(gfx942_mma_group(gfx942_mma_group(c, a, b, t), a + 8, b + 8, t), 0.0f);
  } else {
    float sum = abs_of(c) < 0x1p-126f ? 0.0f : c;  // the instruction flushes a subnormal accumulator to +0, once
    for (int k = 0; k < kMmaStepK; k += 4) sum = gfx90a_mma_group(sum, a + k, b + k, t);
    return add_rn(sum, 0.0f);
  }
}

// c + a . b over k in ascending steps. A short last step is padded with +0, as the kernels pad their tiles.
template <MmaUnit U>
RLK_HD float mma_dot(DType t, const std::uint16_t* a, const std::uint16_t* b, std::int64_t k, float c = 0.0f) {
  std::int64_t i = 0;
  for (; i + kMmaStepK <= k; i += kMmaStepK) c = mma_step<U>(c, a + i, b + i, t);
  if (i == k) return c;
  std::uint16_t last_a[kMmaStepK] = {}, last_b[kMmaStepK] = {};
  for (int j = 0; i + j < k; ++j) {
    last_a[j] = a[i + j];
    last_b[j] = b[i + j];
  }
  return mma_step<U>(c, last_a, last_b, t);
}

inline float mma_dot(MmaUnit unit, DType t, const std::uint16_t* a, const std::uint16_t* b, std::int64_t k,
                     float c = 0.0f) {
  switch (unit) {
    case MmaUnit::kSm80:
      return mma_dot<MmaUnit::kSm80>(t, a, b, k, c);
    case MmaUnit::kSm90:
      return mma_dot<MmaUnit::kSm90>(t, a, b, k, c);
    case MmaUnit::kGfx90a:
      return mma_dot<MmaUnit::kGfx90a>(t, a, b, k, c);
    case MmaUnit::kGfx942:
      break;
  }
  return mma_dot<MmaUnit::kGfx942>(t, a, b, k, c);
}

}  // namespace rlk
