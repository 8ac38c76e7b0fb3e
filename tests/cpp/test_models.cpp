// Tests arithmetic that imitates hardware, and the formats that it uses: half.h, philox.h, mufu_model.h, mma_model.h.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "rlk/math/half.h"
#include "rlk/math/ieee.h"
#include "rlk/math/mma_model.h"
#include "rlk/math/mufu_model.h"
#include "rlk/math/philox.h"

namespace rlk {
namespace {

std::uint32_t hex(float f) { return static_cast<std::uint32_t>(bits_of(f)); }
float of(std::uint32_t bits) { return float_of(static_cast<std::int32_t>(bits)); }

// ---------------------------------------------------------------------------------------------------------------- half

constexpr std::uint64_t kStride = 251;  // prime, so every residue of the low 16 bits occurs; 17 million values

struct HalfFormat {
  int fraction_bits, bias;
};
constexpr HalfFormat kBf16 = {7, 127}, kF16 = {10, 15};

// The definition in double, where every value of both formats and every midpoint is exact.
double value_of(std::uint32_t h, HalfFormat format) {
  const std::uint32_t fields = h & 0x7fffu;
  const int field = static_cast<int>(fields >> format.fraction_bits);
  const double fraction = std::ldexp(fields & ((1u << format.fraction_bits) - 1), -format.fraction_bits);
  const double magnitude =
      field == 0 ? std::ldexp(fraction, 1 - format.bias) : std::ldexp(1 + fraction, field - format.bias);
  return (h & 0x8000u) ? -magnitude : magnitude;  // the code of Inf gives the next power of two, as rounding needs it
}

TEST(Half, WideningIsExactForEveryCode) {
  for (std::uint32_t h = 0; h < 0x10000u; ++h) {
    const auto code = static_cast<std::uint16_t>(h);
    const std::uint32_t magnitude = h & 0x7fffu;
    if (magnitude > 0x7f80u) {
      ASSERT_TRUE(std::isnan(float_of_bf16(code))) << h;
    } else if (magnitude == 0x7f80u) {
      ASSERT_EQ(hex(float_of_bf16(code)), (h & 0x8000u) ? 0xff800000u : 0x7f800000u);
    } else {
      ASSERT_EQ(hex(float_of_bf16(code)), hex(static_cast<float>(value_of(h, kBf16)))) << h;
    }
    if (magnitude > 0x7c00u) {
      ASSERT_TRUE(std::isnan(float_of_f16(code))) << h;
    } else if (magnitude == 0x7c00u) {
      ASSERT_EQ(hex(float_of_f16(code)), (h & 0x8000u) ? 0xff800000u : 0x7f800000u);
    } else {
      ASSERT_EQ(hex(float_of_f16(code)), hex(static_cast<float>(value_of(h, kF16)))) << h;
    }
  }
}

TEST(Half, NarrowingInvertsWidening) {
  for (std::uint32_t h = 0; h < 0x10000u; ++h) {
    const auto code = static_cast<std::uint16_t>(h);
    const bool bf16_nan = (h & 0x7fffu) > 0x7f80u, f16_nan = (h & 0x7fffu) > 0x7c00u;
    ASSERT_EQ(bf16_rn(float_of_bf16(code)), bf16_nan ? 0x7fff : code);
    ASSERT_EQ(bf16_rd(float_of_bf16(code)), bf16_nan ? 0x7fff : code);
    ASSERT_EQ(f16_rn(float_of_f16(code)), f16_nan ? 0x7fff : code);
  }
}

// Checks that `h` is nearer than its two neighbours, or even if half way.
void expect_nearest(double x, std::uint16_t h, HalfFormat format) {
  ASSERT_EQ((h & 0x8000u) != 0, std::signbit(x)) << x;
  const double error = std::fabs(std::fabs(x) - std::fabs(value_of(h, format)));
  for (int step : {-1, 1}) {
    const std::uint32_t inf = static_cast<std::uint32_t>(2 * format.bias + 1) << format.fraction_bits;
    const std::uint32_t fields = (h & 0x7fffu) + static_cast<std::uint32_t>(step);
    if (fields > inf) continue;  // skips codes below zero, which wrap, and beyond Inf
    const double other = std::fabs(std::fabs(x) - value_of(fields, format));
    ASSERT_LE(error, other) << x;
    ASSERT_TRUE(error != other || (h & 1u) == 0) << x;
  }
}

void expect_half(float x) {
  if (std::isnan(x)) {
    ASSERT_EQ(bf16_rn(x), 0x7fff);
    ASSERT_EQ(bf16_rd(x), 0x7fff);
    ASSERT_EQ(f16_rn(x), 0x7fff);
    return;
  }
  if (std::isinf(x)) {
    ASSERT_EQ(bf16_rn(x), x > 0 ? 0x7f80 : 0xff80);
    ASSERT_EQ(bf16_rd(x), x > 0 ? 0x7f80 : 0xff80);
    ASSERT_EQ(f16_rn(x), x > 0 ? 0x7c00 : 0xfc00);
    return;
  }
  expect_nearest(x, bf16_rn(x), kBf16);
  if (std::fabs(x) >= 65536.0f) {  // more than half a step beyond the largest finite binary16
    ASSERT_EQ(f16_rn(x), x > 0 ? 0x7c00 : 0xfc00);
  } else {
    expect_nearest(x, f16_rn(x), kF16);
  }
  const std::uint16_t down = bf16_rd(x);
  ASSERT_LE(float_of_bf16(down), x);
  const std::uint16_t above = static_cast<std::uint16_t>(down & 0x8000u ? down - 1 : down + 1);
  ASSERT_TRUE(down == 0x8000u || float_of_bf16(above) > x) << x;
}

TEST(Half, NarrowingIsCorrectlyRounded) {
  for (std::uint64_t b = 0; b < (std::uint64_t{1} << 32); b += kStride) {
    expect_half(of(static_cast<std::uint32_t>(b)));
    if (HasFatalFailure()) return;
  }
}

TEST(Half, TiesAndEnds) {
  for (std::uint32_t h = 0; h < 0x7c00u; ++h) {  // tries the midpoint above every finite binary16, and its neighbours
    const float middle = static_cast<float>((value_of(h, kF16) + value_of(h + 1, kF16)) / 2);
    for (std::uint32_t bits : {hex(middle) - 1, hex(middle), hex(middle) + 1}) {
      expect_half(of(bits));
      expect_half(of(bits | 0x80000000u));
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(f16_rn(65519.996f), 0x7bff);
  EXPECT_EQ(f16_rn(65520.0f), 0x7c00);
  EXPECT_EQ(f16_rn(0x1p-25f), 0x0000);  // half of the least subnormal, a tie
  EXPECT_EQ(f16_rn(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(f16_rn(0x1.ffcp-15f), 0x0400);  // rounds up into the normal range
  EXPECT_EQ(bf16_rn(of(0x7f7fffff)), 0x7f80);
  EXPECT_EQ(bf16_rd(of(0x7f7fffff)), 0x7f7f);
  EXPECT_EQ(bf16_rd(of(0xff7fffff)), 0xff80);
  EXPECT_EQ(bf16_rd(of(0x80000001)), 0x8001);
  EXPECT_EQ(bf16_rn2(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(f16_rn2(1.0f, -2.0f), 0xc0003c00u);
}

// -------------------------------------------------------------------------------------------------------------- philox

void expect_block(PhiloxBlock b, std::array<std::uint32_t, 4> expected) {
  EXPECT_EQ((std::array<std::uint32_t, 4>{b.x, b.y, b.z, b.w}), expected);
}

TEST(Philox, KnownAnswers) {  // answers published with the paper's reference implementation
  expect_block(philox4x32({0, 0, 0, 0}, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect_block(philox4x32({~0u, ~0u, ~0u, ~0u}, ~0u, ~0u), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect_block(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Philox, CounterLayout) {
  // The third known answer again: seed, sample and position are in the words that the header names.
  const std::uint64_t seed = 0x299f31d0a4093822u, sample = 0x85a308d3243f6a88u;
  const std::uint32_t position = 0x13198a2eu, block = 0x03707344u;
  expect_block(philox_block(seed, sample, position, block), {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
  const PhiloxBlock b = philox_block(seed, sample, position, 5);
  EXPECT_EQ(philox_bits(seed, sample, position, 20), b.x);
  EXPECT_EQ(philox_bits(seed, sample, position, 21), b.y);
  EXPECT_EQ(philox_bits(seed, sample, position, 22), b.z);
  EXPECT_EQ(philox_bits(seed, sample, position, 23), b.w);
}

TEST(Philox, UniformRanges) {
  EXPECT_EQ(uniform_of_bits(0), 0.0f);
  EXPECT_EQ(uniform_of_bits(~0u), 0x0.ffffffp0f);
  EXPECT_EQ(uniform_of_bits(0x80000000u), 0.5f);
  EXPECT_EQ(positive_uniform_of_bits(0), 0x1p-33f);
  EXPECT_EQ(positive_uniform_of_bits(1), 0x1.8p-32f);
  EXPECT_EQ(positive_uniform_of_bits(~0u), 1.0f);
  EXPECT_EQ(philox_uniform(0, 0, 0, 0), static_cast<float>(0x6627e8u) * 0x1p-24f);
}

// ---------------------------------------------------------------------------------------------------------------- mufu

std::string sha256(const std::vector<std::int8_t>& data) {  // FIPS 180-4
  static const std::uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::vector<std::uint8_t> padded(data.begin(), data.end());
  padded.push_back(0x80);
  while (padded.size() % 64 != 56) padded.push_back(0);
  const std::uint64_t bits = std::uint64_t{data.size()} * 8;
  for (int i = 7; i >= 0; --i) padded.push_back(static_cast<std::uint8_t>(bits >> (8 * i)));
  const auto rotate = [](std::uint32_t x, int n) { return (x >> n) | (x << (32 - n)); };
  for (std::size_t block = 0; block < padded.size(); block += 64) {
    std::uint32_t w[64], s[8];
    for (std::size_t i = 0; i < 16; ++i)
      w[i] = std::uint32_t{padded[block + 4 * i]} << 24 | std::uint32_t{padded[block + 4 * i + 1]} << 16 |
             std::uint32_t{padded[block + 4 * i + 2]} << 8 | padded[block + 4 * i + 3];
    for (int i = 16; i < 64; ++i)
      w[i] = w[i - 16] + w[i - 7] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3)) +
             (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10));
    for (int i = 0; i < 8; ++i) s[i] = h[i];
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t t1 = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
                               ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
      const std::uint32_t t2 =
          (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      for (int j = 7; j > 0; --j) s[j] = s[j - 1];
      s[4] += t1;
      s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; ++i) h[i] += s[i];
  }
  char text[65];
  for (int i = 0; i < 8; ++i) std::snprintf(text + 8 * i, 9, "%08x", h[i]);
  return text;
}

TEST(MufuEx2, SignificandsAreTheRecordedOnes) {
  // Differences in units in the last place between the instruction and the correctly rounded 2^(i / 2^23), measured on
  // an H200 for every i. Rounding a double exp2 is exact here, since no such value lies that close to a midpoint of
  // fp32.
  std::vector<std::int8_t> delta(std::size_t{1} << 23);
  int count[3] = {};
  for (std::int32_t i = 0; i < (1 << 23); ++i) {
    const std::int32_t nearest = bits_of(static_cast<float>(std::exp2(i * 0x1p-23))) - 0x3f800000;
    const std::int32_t d = mufu_ex2_significand(i) - nearest;
    ASSERT_TRUE(d >= -1 && d <= 1) << i;
    ++count[d + 1];
    delta[static_cast<std::size_t>(i)] = static_cast<std::int8_t>(d);
  }
  EXPECT_EQ(count[0], 3093);
  EXPECT_EQ(count[1], 5125875);
  EXPECT_EQ(count[2], 3259640);
  EXPECT_EQ(sha256(delta), "5c2be537e7156bebabf28d5b3dfbab242a80051b2d95a43701e91e3d3b9cc293");
}

TEST(MufuEx2, SquarerDropsLightPartialProducts) {
  for (std::int32_t o = 0; o < (1 << 17); ++o) {
    std::int64_t square = 0;
    for (int i = 0; i < 17; ++i)
      for (int j = i; j < 17; ++j) {
        const int column = i == j ? 2 * i : i + j + 1;
        if (column >= 19 && (o >> i & 1) && (o >> j & 1)) square += std::int64_t{1} << (column - 19);
      }
    ASSERT_EQ(mufu_square(o), square) << o;
  }
}

TEST(MufuEx2, ArgumentIsCutThenComplemented) {
  EXPECT_EQ(mufu_ex2_fixed(1.0f), 1 << 23);
  EXPECT_EQ(mufu_ex2_fixed(-1.0f), -(1 << 23));  // a whole number is negated exactly
  EXPECT_EQ(mufu_ex2_fixed(0x1.8p-23f), 1);
  EXPECT_EQ(mufu_ex2_fixed(-0x1.8p-23f), -2);
  EXPECT_EQ(mufu_ex2_fixed(-0x1p-24f), 0);  // cut to zero, and then negated like a whole number
  EXPECT_EQ(mufu_ex2_fixed(-255.0f), -255 * (1 << 23));
}

TEST(MufuEx2, Ends) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(hex(mufu_ex2_sm90(0.0f)), 0x3f800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(-0.0f)), 0x3f800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(of(0x007fffff))), 0x3f800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(of(0x807fffff))), 0x3f800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(-126.0f)), 0x00800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(std::nextafter(-126.0f, -inf))), 0u);
  EXPECT_EQ(hex(mufu_ex2_sm90(-300.0f)), 0u);
  EXPECT_EQ(hex(mufu_ex2_sm90(-inf)), 0u);
  EXPECT_EQ(hex(mufu_ex2_sm90(127.0f)), 0x7f000000u);
  EXPECT_LT(hex(mufu_ex2_sm90(std::nextafter(128.0f, 0.0f))), 0x7f800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(128.0f)), 0x7f800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(inf)), 0x7f800000u);
  EXPECT_EQ(hex(mufu_ex2_sm90(of(0x7fc00000))), 0x7fffffffu);
  EXPECT_EQ(hex(mufu_ex2_sm90(of(0xff800001))), 0x7fffffffu);
}

TEST(MufuEx2, BoundedFormIsTheSameFunction) {
  for (std::uint64_t b = 0; b < (std::uint64_t{1} << 32); b += kStride) {
    const float x = of(static_cast<std::uint32_t>(b));
    if (!(x >= -127.0f && x <= 1.0f)) continue;
    ASSERT_EQ(hex(mufu_ex2_sm90_bounded(x)), hex(mufu_ex2_sm90(x))) << x;
  }
}

// ----------------------------------------------------------------------------------------------------------------- mma

constexpr MmaUnit kUnits[] = {MmaUnit::kSm80, MmaUnit::kSm90, MmaUnit::kGfx90a, MmaUnit::kGfx942};
constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16};

std::uint16_t narrow(float x, DType t) { return t == DType::kBFloat16 ? bf16_rn(x) : f16_rn(x); }

// One step whose k-th product is x[k] * y[k]; missing products are zero.
float step(MmaUnit unit, DType t, float c, const std::vector<float>& x, const std::vector<float>& y) {
  std::uint16_t a[kMmaStepK] = {}, b[kMmaStepK] = {};
  for (std::size_t k = 0; k < x.size(); ++k) {
    a[k] = narrow(x[k], t);
    b[k] = narrow(y[k], t);
  }
  return mma_dot(unit, t, a, b, kMmaStepK, c);
}
float step(MmaUnit unit, float c, const std::vector<float>& x) {
  return step(unit, DType::kBFloat16, c, x, std::vector<float>(x.size(), 1.0f));
}

TEST(MmaModel, ExactWhenEveryAddendFits) {
  for (MmaUnit unit : kUnits)
    for (DType t : kTypes) {
      std::vector<float> x, y;
      float expected = -1000.5f;
      for (int k = 0; k < kMmaStepK; ++k) {
        x.push_back(static_cast<float>(k - 5));
        y.push_back(0.25f * static_cast<float>(3 * k + 1));
        expected += x.back() * y.back();
      }
      EXPECT_EQ(step(unit, t, -1000.5f, x, y), expected);
    }
}

TEST(MmaModel, AlignmentKeeps25BitsOnSm90And24OnSm80) {
  const float up = of(0x3f800001);  // 1 + 2^-23
  // Four addends of 2^-25 together make one unit of 1.0, if each survives the alignment to 1.0.
  EXPECT_EQ(step(MmaUnit::kSm90, 1.0f, std::vector<float>(4, 0x1p-25f)), up);
  EXPECT_EQ(step(MmaUnit::kSm80, 1.0f, std::vector<float>(4, 0x1p-25f)), 1.0f);
  EXPECT_EQ(step(MmaUnit::kSm80, 1.0f, std::vector<float>(2, 0x1p-24f)), up);
  EXPECT_EQ(step(MmaUnit::kSm90, 1.0f, std::vector<float>(8, 0x1p-26f)), 1.0f);
  // The exponent of a product is the sum of its operands' exponents: 1.5 * 1.5 = 2.25 still aligns to 2^0.
  const std::vector<float> x = {1.5f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f};
  std::vector<float> y(9, 1.0f);
  y[0] = 1.5f;
  EXPECT_EQ(step(MmaUnit::kSm90, DType::kBFloat16, 0.0f, x, y), 2.25f + 0x1p-22f);
  EXPECT_EQ(step(MmaUnit::kSm90, 0.0f, x), 1.5f + 0x1p-22f);
}

TEST(MmaModel, NvidiaCutsAndRoundsTowardZero) {
  for (MmaUnit unit : {MmaUnit::kSm80, MmaUnit::kSm90}) {
    EXPECT_EQ(step(unit, 1.0f, {0x1.8p-24f}), 1.0f);  // three quarters of a unit
    EXPECT_EQ(step(unit, -1.0f, {-0x1.8p-24f}), -1.0f);
    EXPECT_EQ(step(unit, 1.0f, {-0x1p-26f}), 1.0f);  // cut to zero; cut downward it would borrow
    EXPECT_EQ(step(unit, 1.0f, {-0x1p-24f}), of(0x3f7fffff));
  }
}

TEST(MmaModel, CancellationLeavesWhatTheAlignmentKept) {
  // An addend aligned to 2^20 keeps 25 fraction bits on sm_90, down to 2^-5, and 24 on sm_80, down to 2^-4.
  EXPECT_EQ(step(MmaUnit::kSm90, 0.0f, {0x1p20f, -0x1p20f, 0x1.8p-5f}), 0x1p-5f);
  EXPECT_EQ(step(MmaUnit::kSm80, 0.0f, {0x1p20f, -0x1p20f, 0x1.8p-5f}), 0.0f);
  EXPECT_EQ(step(MmaUnit::kSm90, -0x1p20f, {0x1p20f, 0x1.8p-5f}), 0x1p-5f);
}

TEST(MmaModel, Sm80AddsTheFirstHalfFirst) {
  std::vector<float> small_first(16, 0.0f), large_first(16, 0.0f);
  small_first[0] = 1.0f, small_first[8] = 0x1p25f, small_first[9] = -0x1p25f;
  large_first[0] = 0x1p25f, large_first[1] = -0x1p25f, large_first[8] = 1.0f;
  EXPECT_EQ(step(MmaUnit::kSm80, 0.0f, small_first), 0.0f);
  EXPECT_EQ(step(MmaUnit::kSm80, 0.0f, large_first), 1.0f);
  EXPECT_EQ(step(MmaUnit::kSm90, 0.0f, small_first), 1.0f);  // aligned to 2^25, 1.0 is the last of 25 bits
  EXPECT_EQ(step(MmaUnit::kSm90, 0.0f, large_first), 1.0f);
}

TEST(MmaModel, Gfx942CutsDownwardAndRoundsToNearest) {
  EXPECT_EQ(step(MmaUnit::kGfx942, -0x1p-40f, {1.0f}), of(0x3f7fffff));  // the accumulator borrows one bit of 24
  EXPECT_EQ(step(MmaUnit::kGfx942, 0x1p-40f, {1.0f}), 1.0f);
  EXPECT_EQ(step(MmaUnit::kGfx942, 1.0f, {-0x1p-40f}), 1.0f);  // products keep 31 bits, so -2^-40 is rounded away
  EXPECT_EQ(step(MmaUnit::kGfx942, 1.0f, {0x1p-24f}), 1.0f);   // a tie goes to even
  EXPECT_EQ(step(MmaUnit::kGfx942, of(0x3f800001), {0x1p-24f}), of(0x3f800002));
  EXPECT_EQ(step(MmaUnit::kGfx942, 0.0f, {1.0f, -0x1p-26f}), 1.0f);  // a sum of products truncates toward zero
  EXPECT_EQ(step(MmaUnit::kGfx942, DType::kBFloat16, -0x1p127f, {0x1p64f}, {0x1p64f}),
            std::numeric_limits<float>::infinity());  // a product beyond fp32 is Inf by itself
}

TEST(MmaModel, Gfx90aAddsInPairsAndFlushes) {
  EXPECT_EQ(step(MmaUnit::kGfx90a, 0.0f, {0x1p24f, 1.0f, 1.0f, 1.0f}), 0x1p24f + 2.0f);  // one after another: 2^24
  EXPECT_EQ(step(MmaUnit::kGfx90a, 0.0f, {0x1p24f, 0.0f, 0.0f, 0.0f, 1.0f, 0.0f, 0.0f, 0.0f, 1.0f}), 0x1p24f);
  EXPECT_EQ(hex(step(MmaUnit::kGfx90a, of(0x007fffff), {})), 0u);
  EXPECT_EQ(hex(step(MmaUnit::kGfx90a, DType::kFloat16, 0.0f, {0x1p-15f}, {1.0f})), 0u);
  EXPECT_EQ(hex(step(MmaUnit::kGfx90a, DType::kBFloat16, 0.0f, {0x1p-64f}, {0x1p-64f})), 0u);
  EXPECT_EQ(step(MmaUnit::kGfx942, DType::kFloat16, 0.0f, {0x1p-15f}, {1.0f}), 0x1p-15f);
}

TEST(MmaModel, SubnormalsCountOnNvidia) {
  for (MmaUnit unit : {MmaUnit::kSm80, MmaUnit::kSm90}) {
    EXPECT_EQ(step(unit, DType::kFloat16, 0.0f, {0x1p-24f}, {0x1p-24f}), 0x1p-48f);
    EXPECT_EQ(hex(step(unit, DType::kBFloat16, of(5), {0x1p-75f}, {0x1p-74f})), 6u);
    EXPECT_EQ(hex(step(unit, DType::kBFloat16, 0.0f, {-0x1p-133f}, {1.0f})), 0x80010000u);
    EXPECT_EQ(hex(step(unit, of(0x00800000), {-0x1p-133f})), 0x007f0000u);
  }
}

TEST(MmaModel, InfAndNan) {
  const float inf = std::numeric_limits<float>::infinity(), nan = of(0xffc00001);
  for (MmaUnit unit : kUnits)
    for (DType t : kTypes) {
      const std::uint32_t canonical = unit == MmaUnit::kSm80 || unit == MmaUnit::kSm90 ? 0x7fffffffu : 0x7fc00000u;
      EXPECT_EQ(hex(step(unit, t, 1.0f, {inf, 1.0f}, {-2.0f, 1.0f})), 0xff800000u);
      EXPECT_EQ(hex(step(unit, t, inf, {inf}, {1.0f})), 0x7f800000u);
      EXPECT_EQ(hex(step(unit, t, inf, {-inf}, {1.0f})), canonical);
      EXPECT_EQ(hex(step(unit, t, 0.0f, {inf, -inf}, {1.0f, 1.0f})), canonical);
      EXPECT_EQ(hex(step(unit, t, 0.0f, {inf}, {0.0f})), canonical);
      EXPECT_EQ(hex(step(unit, t, nan, {1.0f}, {1.0f})), canonical);
      EXPECT_EQ(hex(step(unit, t, 0.0f, {nan}, {0.0f})), canonical);
    }
}

TEST(MmaModel, OverflowAndZeros) {
  for (MmaUnit unit : kUnits) {
    EXPECT_EQ(hex(step(unit, 0x1p127f, {0x1p127f})), 0x7f800000u);
    EXPECT_EQ(hex(step(unit, -0x1p127f, {-0x1p127f})), 0xff800000u);
    EXPECT_EQ(hex(step(unit, 3.0f, {-3.0f})), 0u);
    EXPECT_EQ(hex(step(unit, -0.0f, {})), 0u);
  }
  // Partial sums beyond fp32 cancel exactly on NVIDIA: all addends form one sum, not a chain.
  EXPECT_EQ(step(MmaUnit::kSm90, 1.0f, {0x1p127f, 0x1p127f, -0x1p127f, -0x1p127f}), 0.0f);
  EXPECT_EQ(step(MmaUnit::kSm90, 0x1p103f, {0x1p127f, 0x1p127f, -0x1p127f, -0x1p127f}), 0x1p103f);
}

struct MmaCase {
  DType type;
  std::uint32_t c, d;
  const char *a, *b;  // as the GPU test prints them
};

// Results of an H200, equal for mma.sync and wgmma, recorded from tests/gpu/test_models.cu.
const MmaCase kSm90Cases[] = {
    // The exponent of a zero accumulator is ignored. All these cases fail if the exponent counts as -126.
    {DType::kBFloat16, 0x00000000, 0x000051b7,
     "964a 9403 1e4f 1a95 99cc 94e8 9afc 1410 1c13 133d 9677 96f6 9d5a 1648 1956 1417",
     "9f23 17dd 93ec 20fc 1ecf 9cda 1b80 96ea 1e00 9bc0 1f5c 1618 9aa3 9df5 1c1c 1928"},
    {DType::kBFloat16, 0x00000000, 0x000584e9,
     "1708 1810 14fa 9685 1ece 9d4d 9d51 16f7 98d4 1a11 17ef 1ab2 a0e0 16b5 98cf 1383",
     "9f23 17dd 93ec 20fc 1ecf 9cda 1b80 96ea 1e00 9bc0 1f5c 1618 9aa3 9df5 1c1c 1928"},
    {DType::kBFloat16, 0x00000000, 0x000a9ab1,
     "1708 1810 14fa 9685 1ece 9d4d 9d51 16f7 98d4 1a11 17ef 1ab2 a0e0 16b5 98cf 1383",
     "1c4a 9e3c 9c41 1f81 9caf 9a71 a0d5 1360 15be 1934 1fdb 1e07 14ef 216d 9950 9d7e"},
    {DType::kBFloat16, 0x80000000, 0x805898e7,
     "9423 211f 9ea4 9ed0 1ae9 182a 9a90 1532 1e8e 1d08 9bbb 1589 1653 a056 95e0 9540",
     "9f23 17dd 93ec 20fc 1ecf 9cda 1b80 96ea 1e00 9bc0 1f5c 1618 9aa3 9df5 1c1c 1928"},
    {DType::kBFloat16, 0x80000000, 0x808bf660,
     "9423 211f 9ea4 9ed0 1ae9 182a 9a90 1532 1e8e 1d08 9bbb 1589 1653 a056 95e0 9540",
     "99a4 9bc8 1971 138c 9b97 9fa6 9e9c 1a94 a179 1daf 1bfd 182e 9368 1574 96c6 183a"},
    {DType::kBFloat16, 0x80000000, 0x8006f2c7,
     "1954 19fa 1dc9 9f0d 9bb0 93c1 9cdb 1895 9b57 96a7 1841 1e3a 947d 1c16 9b9c 9cc5",
     "1c4a 9e3c 9c41 1f81 9caf 9a71 a0d5 1360 15be 1934 1fdb 1e07 14ef 216d 9950 9d7e"},
    {DType::kBFloat16, 0x00000000, 0x80002678,
     "1695 1c7a 9fb5 9884 98c7 1816 9a7c 9dde 99dc 19a5 19ea 16a0 14fc 17d5 9ef1 9a45",
     "9f23 17dd 93ec 20fc 1ecf 9cda 1b80 96ea 1e00 9bc0 1f5c 1618 9aa3 9df5 1c1c 1928"},
    {DType::kBFloat16, 0x00000000, 0x0000afe9,
     "1695 1c7a 9fb5 9884 98c7 1816 9a7c 9dde 99dc 19a5 19ea 16a0 14fc 17d5 9ef1 9a45",
     "1c4a 9e3c 9c41 1f81 9caf 9a71 a0d5 1360 15be 1934 1fdb 1e07 14ef 216d 9950 9d7e"},
    // Addends are aligned to 2^-133 at least: the cases below fail with -134.
    {DType::kBFloat16, 0x00000000, 0x00000099,
     "9b14 9aba 991e 9c7b 9b8f 9b55 1b57 9a30 9b6f 9988 1c4d 9a41 1a3b 9ba7 9b7a 9aac",
     "1aa8 9b69 196c 9b86 1996 19d4 197d 9b66 1bd7 9951 99f8 1c5e 9965 9b1a 9c1e 1a76"},
    {DType::kBFloat16, 0x00000000, 0x80000172,
     "1c58 9a1b 9bc5 1960 9bfd 1c59 1ac9 9c6e 1a36 9976 990a 9c50 9b3a 998a 1922 1c68",
     "1b62 1b65 9a80 9ac1 1935 9c52 1c23 1ad9 9ab5 9a85 1ab4 1b4d 1a5b 9acb 1b30 9977"},
    {DType::kBFloat16, 0x00000000, 0x00000117,
     "9a26 1b81 1a70 1b4c 9a71 1a84 99be 1a6b 991a 9abb 9b57 1a27 9c22 9a66 9c74 9961",
     "9b93 1bc1 9b6d 9a1e 1c26 9bc7 9bdd 9b5a 99d4 1a2b 190e 1a99 994b 193b 9c0c 1aa9"},
    {DType::kBFloat16, 0x80000000, 0x00008b0f,
     "1759 9581 9f38 9fcf 1c82 97b4 93c6 1f39 990d 15e1 1e98 1afa 171c 1b45 967b 17e3",
     "9445 a09d 149a 9c0b 93e2 179d 98bf 165f 1760 1ac4 9591 1c85 998a 1f89 9744 992a"},
    {DType::kBFloat16, 0x00000000, 0x0001e7d2,
     "9855 1ff7 9d26 970f 978d 9456 9982 1555 9d07 9989 9806 1b9f 1a2f a00e 1b10 9778",
     "1773 1cf9 15d2 9ea5 1bce 201f 1b1f 1b85 9cf7 947a 9e93 9ced 99ee 9769 9479 14f8"},
    // The cases below fail with -132.
    {DType::kBFloat16, 0x00000000, 0x80000172,
     "1c58 9a1b 9bc5 1960 9bfd 1c59 1ac9 9c6e 1a36 9976 990a 9c50 9b3a 998a 1922 1c68",
     "1b62 1b65 9a80 9ac1 1935 9c52 1c23 1ad9 9ab5 9a85 1ab4 1b4d 1a5b 9acb 1b30 9977"},
    {DType::kBFloat16, 0x00000000, 0x00000039,
     "9c6b 1900 99d6 9b05 9a10 1bb0 1c28 1b31 99dd 1a7e 9b14 9c73 9a90 996a 99a7 19a0",
     "19e6 9a08 1bc8 1a46 9c72 1abb 1b87 9942 195e 9a47 9a36 1abd 9af0 1b9a 19bd 1a83"},
    {DType::kBFloat16, 0x80000000, 0x00000217,
     "9937 9ab7 1ad2 9c19 9913 9b47 1991 9abb 9b38 9c62 1b8c 1935 9c59 9a2c 9ba4 9b80",
     "9b6f 1a25 195d 1b76 9a37 9aa4 1b64 1917 9ab9 9bd8 1c6c 9c12 99d7 9a10 9c5d 9c70"},
    {DType::kBFloat16, 0x80000000, 0x00010f56,
     "1704 9d09 9e16 9983 9ec3 9e46 943f 18c2 935a 940e 9b71 9857 1b2e 9d33 9a17 9546",
     "17de 94f9 1ae5 144d 9df0 1d6f 20cb 16ad 988a 2096 1692 191f 1c51 15c1 1ba9 1e39"},
    // A negative sum that rounds to zero is +0.
    {DType::kBFloat16, 0x80000000, 0x00000000,
     "9412 9723 9874 a16f 13c3 1a26 9459 201d 1a22 9312 1f79 1806 15f1 1b2e 1b7b 142e",
     "1daa 9375 9e40 1551 9667 1abc 1f2e 932d 16ac a162 950f 99c2 146f 94d4 9659 9e3b"},
    {DType::kBFloat16, 0x80000000, 0x00000000,
     "1673 9d7d 1f85 1cfb 1e04 1672 1668 13ad 13ed 177c 1575 9349 1890 972d 9dd7 1353",
     "93f2 9ac2 1955 9c3b 94ce 9a12 966c 20d3 93b4 1a39 1b80 1873 1f2e 1743 147c 181a"},
    // Addends of -0 only make +0.
    {DType::kBFloat16, 0x80000000, 0x00000000,
     "3f80 3f80 3f80 3f80 0000 0000 0000 0000 3f80 3f80 3f80 3f80 0000 0000 0000 3f80",
     "8000 8000 8000 8000 8000 8000 8000 8000 8000 8000 8000 8000 8000 8000 8000 8000"},
    // A zero product does not align either.
    {DType::kBFloat16, 0x80000000, 0xaf048d31,
     "4023 ee47 6fb0 b8bb b511 c0b9 8000 8000 308b b425 350c b0c3 3463 0000 0000 b7b4",
     "0000 0000 8000 3389 395f 0000 3fed 8000 8000 8000 0000 8000 3358 3f12 b2d6 0000"},
    {DType::kBFloat16, 0x32dcd085, 0xb460fb6f,
     "3ac0 32f8 8000 0000 ba9d 40d4 0000 7bf6 2f9a 37c4 3f7c 329d 3f00 8000 3e68 8000",
     "0000 0000 8000 3389 395f 0000 3fed 8000 8000 8000 0000 8000 3358 3f12 b2d6 0000"},
    // Overflow becomes Inf.
    {DType::kBFloat16, 0x3f5b231b, 0x7f800000,
     "d7c9 d6f2 0337 b06e 7864 fd3f 58e7 9e96 b014 b9fe 4bc8 c52b aed1 5e8e e587 eed5",
     "fca2 7387 8637 8ab6 953d b8ef 93c2 1045 7e98 aeaa 3a88 5abf feba 3cbe c8f3 e4c8"},
    {DType::kBFloat16, 0x20519553, 0x7f800000,
     "d6ac ad34 30d0 8bf5 c0d2 4a49 f9e2 8db6 33ba 2414 688a d4bd f03b 2c6c 3f8d 0b5c",
     "fca2 7387 8637 8ab6 953d b8ef 93c2 1045 7e98 aeaa 3a88 5abf feba 3cbe c8f3 e4c8"},
    // 25 fraction bits are kept: the cases below fail with 24.
    {DType::kBFloat16, 0x40dbf4a0, 0x4082ddba,
     "bf6c beb8 3e98 3ed7 c01b bf5e 3f96 3f0b bf11 3df9 bf34 beef bbde 3dde 3ede be98",
     "be57 3fa3 c01c bf6f 3ea6 3e49 bf44 3f8f 3f95 bfdc bff1 3df9 3ed3 beaa bfcc bf15"},
    {DType::kBFloat16, 0x410a8e00, 0x4109eda7,
     "bf96 3e04 bf4b 3f98 be11 3f47 be0b bea6 bbde bf39 bee8 3f86 3fc3 3fa8 bd0b beef",
     "3e91 3ff2 3fe8 3dde 3e26 3f97 3ef6 bfb8 3e6c bf31 3fba bfef 3f91 3dc2 bf05 bf2a"},
    {DType::kBFloat16, 0x3e5a1b1f, 0x3e5a1b1c,
     "bf9f bfd8 bfad bed7 3f9a 3fca 3e6c bf0b bf9f bfd8 bfad bed7 3f9a 3fca 3e6c bf0b",
     "bf78 beb8 bf98 beaa 3f9c 4008 becc c015 3f78 3eb8 3f98 3eaa bf9c c008 3ecc 4015"},
    // The same for binary16: 25 bits, zero products.
    {DType::kFloat16, 0x3ecfd500, 0x3f4ce971,
     "b48c bc70 3d8c 3a8d b916 405b 35a1 b9e6 3e10 abcb 34df b3cb b839 2e10 3aa8 3054",
     "2c54 3ecb bbf5 3663 3b78 3ac4 419e b67f 4020 39bd bcc3 3cca 3ea8 b325 bc0f 3baf"},
    {DType::kFloat16, 0xc077aaa0, 0xbfca82c5,
     "3977 362c bf09 b35c b4fb bc32 ad32 bc1d c00f 3c5b 3fa9 34df bb33 a6ee 40ce 3da8",
     "bc5b be09 3be7 2c54 b054 ba10 308c 3ddf 38fb 4088 3bcb 3d24 ba63 3f71 3bbd b48c"},
    {DType::kFloat16, 0xbf36e24f, 0xbeb3768d,
     "14d9 0000 fa6d b4e1 8000 0000 0000 8000 0000 0000 8dd1 0000 6969 9723 0000 8000",
     "4e83 703a 8000 b7eb 0000 0000 8000 89b4 bac6 0000 13b2 0ffb 8587 db75 0000 0000"},
    {DType::kFloat16, 0x0a5dead1, 0xc87cc282,
     "a1ac 6cde 275b c724 9116 d4e7 4f5f 6a73 9351 56d5 a630 4e7a 4cc2 0c92 d0ae e956",
     "e123 3682 8770 f6ed f13b 71a4 ca12 be87 6d17 2124 957a 7439 44b8 51c5 a8b0 ae22"},
};

TEST(MmaModel, Sm90MatchesRecordedResults) {
  for (const MmaCase& m : kSm90Cases) {
    std::uint16_t a[kMmaStepK], b[kMmaStepK];
    std::istringstream a_text(m.a), b_text(m.b);
    for (int k = 0; k < kMmaStepK; ++k) ASSERT_TRUE(a_text >> std::hex >> a[k] && b_text >> std::hex >> b[k]);
    EXPECT_EQ(hex(mma_step<MmaUnit::kSm90>(of(m.c), a, b, m.type)), m.d) << "a " << m.a << "\nb " << m.b;
  }
}

TEST(MmaModel, AlignmentHasALeastExponent) {
  const DType t = DType::kBFloat16;
  // 2^-149 less 2^-158, where 2^-158 is the last bit kept at 2^-133, rounds to zero. 2^-159 is cut before it can
  // borrow.
  EXPECT_EQ(hex(step(MmaUnit::kSm90, t, 0.0f, {0x1p-75f, -0x1p-79f}, {0x1p-74f, 0x1p-79f})), 0u);
  EXPECT_EQ(hex(step(MmaUnit::kSm90, t, 0.0f, {0x1p-75f, -0x1p-80f}, {0x1p-74f, 0x1p-79f})), 1u);
  // A subnormal accumulator aligns at 2^-126, where 2^-152 and smaller addends are cut.
  EXPECT_EQ(hex(step(MmaUnit::kSm90, t, of(2), {-0x1p-76f}, {0x1p-75f})), 1u);
  EXPECT_EQ(hex(step(MmaUnit::kSm90, t, of(2), {-0x1p-76f}, {0x1p-76f})), 2u);
}

TEST(MmaModel, Sm90Zeros) {
  const DType t = DType::kBFloat16;
  EXPECT_EQ(hex(step(MmaUnit::kSm90, t, -0.0f, std::vector<float>(16, -0.0f), std::vector<float>(16, 1.0f))), 0u);
  EXPECT_EQ(hex(step(MmaUnit::kSm90, t, 0.0f, {-0x1p-75f}, {0x1p-75f})), 0u);  // -2^-150
  EXPECT_EQ(hex(step(MmaUnit::kSm90, t, 0.0f, {-0x1p-75f}, {0x1p-74f})), 0x80000001u);
  EXPECT_EQ(step(MmaUnit::kSm90, t, 0x1p-126f, {0.0f}, {0x1p127f}), 0x1p-126f);  // not cut at 2^(1 - 25)
}

TEST(MmaModel, GfxZerosArePlusZero) {
  // Products of -2^-160, which no fp32 holds, and of -2^-140, a subnormal that gfx90a flushes and gfx942 keeps.
  const std::vector<float> x(16, -0x1p-80f), ones(16, 1.0f);
  for (const MmaUnit unit : {MmaUnit::kGfx90a, MmaUnit::kGfx942}) {
    EXPECT_EQ(hex(step(unit, DType::kBFloat16, 0.0f, x, std::vector<float>(16, 0x1p-80f))), 0u);
    EXPECT_EQ(hex(step(unit, DType::kBFloat16, -0.0f, ones, std::vector<float>(16, -0.0f))), 0u);
  }
  const std::vector<float> y(16, 0x1p-60f);
  EXPECT_EQ(hex(step(MmaUnit::kGfx90a, DType::kBFloat16, 0.0f, x, y)), 0u);
  EXPECT_EQ(hex(step(MmaUnit::kGfx942, DType::kBFloat16, 0.0f, x, y)), hex(-0x1p-136f));
}

TEST(MmaModel, DotAscendsInSteps) {
  // The last place of 2^26 is 8. In the first step 2^26 absorbs the later addends; in the last step it meets their sum.
  std::vector<std::uint16_t> a(40, 0), b(40, bf16_rn(1.0f));
  a[0] = bf16_rn(0x1p26f);
  a[16] = a[24] = bf16_rn(1.0f);
  for (MmaUnit unit : kUnits) EXPECT_EQ(mma_dot(unit, DType::kBFloat16, a.data(), b.data(), 40), 0x1p26f);
  a[0] = bf16_rn(6.0f);
  a[39] = bf16_rn(0x1p26f);
  for (MmaUnit unit : kUnits) EXPECT_EQ(mma_dot(unit, DType::kBFloat16, a.data(), b.data(), 40), 0x1p26f + 8.0f);
  for (MmaUnit unit : kUnits) EXPECT_EQ(mma_dot(unit, DType::kBFloat16, a.data(), b.data(), 0, 7.0f), 7.0f);
}

}  // namespace
}  // namespace rlk
