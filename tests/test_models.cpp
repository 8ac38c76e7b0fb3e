// Arithmetic that imitates hardware, and the formats it works on: half.h, philox.h, mufu_model.h, mma_model.h.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
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

constexpr std::uint64_t kStride = 251;  // prime, so every residue of the low 16 bits is met; 17 million values

struct HalfFormat {
  int fraction_bits, bias;
};
constexpr HalfFormat kBf16 = {7, 127}, kF16 = {10, 15};

// The definition, in double, where every value of both formats and every midpoint is exact.
double value_of(std::uint32_t h, HalfFormat format) {
  const std::uint32_t fields = h & 0x7fffu;
  const int field = static_cast<int>(fields >> format.fraction_bits);
  const double fraction = std::ldexp(fields & ((1u << format.fraction_bits) - 1), -format.fraction_bits);
  const double magnitude =
      field == 0 ? std::ldexp(fraction, 1 - format.bias) : std::ldexp(1 + fraction, field - format.bias);
  return (h & 0x8000u) ? -magnitude : magnitude;  // the code of Inf gives the next power of two, as rounding wants it
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

// Checks `h` against its two neighbours: nearest, and even when half way.
void expect_nearest(double x, std::uint16_t h, HalfFormat format) {
  ASSERT_EQ((h & 0x8000u) != 0, std::signbit(x)) << x;
  const double error = std::fabs(std::fabs(x) - std::fabs(value_of(h, format)));
  for (int step : {-1, 1}) {
    const std::uint32_t inf = static_cast<std::uint32_t>(2 * format.bias + 1) << format.fraction_bits;
    const std::uint32_t fields = (h & 0x7fffu) + static_cast<std::uint32_t>(step);
    if (fields > inf) continue;  // below zero wraps, beyond Inf there is nothing
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
  for (std::uint32_t h = 0; h < 0x7c00u; ++h) {  // the midpoint above every finite binary16, and its neighbours
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

TEST(Philox, KnownAnswers) {  // those published with the paper's reference implementation
  expect_block(philox4x32({0, 0, 0, 0}, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect_block(philox4x32({~0u, ~0u, ~0u, ~0u}, ~0u, ~0u), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect_block(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0),
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Philox, CounterLayout) {
  // The third known answer again: seed, sample and position land in the words the header names.
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
  // an H200 for every i. Rounding a double exp2 is exact here: no such value lies that near a midpoint of fp32.
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
  EXPECT_EQ(mufu_ex2_fixed(-0x1p-24f), 0);  // cut to zero, which is whole
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

// One step whose k-th product is x[k] * y[k]; missing ones are zero.
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
  // Four addends of 2^-25 make one unit of 1.0 together, if each survives the alignment to 1.0.
  EXPECT_EQ(step(MmaUnit::kSm90, 1.0f, std::vector<float>(4, 0x1p-25f)), up);
  EXPECT_EQ(step(MmaUnit::kSm80, 1.0f, std::vector<float>(4, 0x1p-25f)), 1.0f);
  EXPECT_EQ(step(MmaUnit::kSm80, 1.0f, std::vector<float>(2, 0x1p-24f)), up);
  EXPECT_EQ(step(MmaUnit::kSm90, 1.0f, std::vector<float>(8, 0x1p-26f)), 1.0f);
  // The exponent of a product is the sum of its operands': 1.5 * 1.5 = 2.25 still aligns to 2^0.
  const std::vector<float> x = {1.5f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f, 0x1p-25f};
  std::vector<float> y(9, 1.0f);
  y[0] = 1.5f;
  EXPECT_EQ(step(MmaUnit::kSm90, DType::kBFloat16, 0.0f, x, y), 2.25f + 0x1p-22f);
  EXPECT_EQ(step(MmaUnit::kSm90, 0.0f, x), 1.5f + 0x1p-22f);
}

TEST(MmaModel, NvidiaCutsAndRoundsTowardZero) {
  for (MmaUnit unit : {MmaUnit::kSm80, MmaUnit::kSm90}) {
    EXPECT_EQ(step(unit, 1.0f, {0x1.8p-24f}), 1.0f);    // three quarters of a unit
    EXPECT_EQ(step(unit, -1.0f, {-0x1.8p-24f}), -1.0f);
    EXPECT_EQ(step(unit, 1.0f, {-0x1p-26f}), 1.0f);     // cut to zero; cut downward it would borrow
    EXPECT_EQ(step(unit, 1.0f, {-0x1p-24f}), of(0x3f7fffff));
  }
}

TEST(MmaModel, CancellationLeavesWhatTheAlignmentKept) {
  // The last kept bit of an addend aligned to 2^20 is 2^-5 with 25 bits and 2^-4 with 24.
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
  EXPECT_EQ(step(MmaUnit::kGfx942, 1.0f, {-0x1p-40f}), 1.0f);            // products keep 31 bits: rounded away
  EXPECT_EQ(step(MmaUnit::kGfx942, 1.0f, {0x1p-24f}), 1.0f);             // ties to even
  EXPECT_EQ(step(MmaUnit::kGfx942, of(0x3f800001), {0x1p-24f}), of(0x3f800002));
  EXPECT_EQ(step(MmaUnit::kGfx942, 0.0f, {1.0f, -0x1p-26f}), 1.0f);      // among products the cut is toward zero
  EXPECT_EQ(step(MmaUnit::kGfx942, DType::kBFloat16, -0x1p127f, {0x1p64f}, {0x1p64f}),
            std::numeric_limits<float>::infinity());                     // a product beyond fp32 is Inf on its own
}

TEST(MmaModel, Gfx90aAddsInPairsAndFlushes) {
  EXPECT_EQ(step(MmaUnit::kGfx90a, 0.0f, {0x1p24f, 1.0f, 1.0f, 1.0f}), 0x1p24f + 2.0f);  // in sequence: 2^24
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
  // Partial sums beyond fp32 cancel exactly on NVIDIA: there is one sum, not a chain.
  EXPECT_EQ(step(MmaUnit::kSm90, 1.0f, {0x1p127f, 0x1p127f, -0x1p127f, -0x1p127f}), 0.0f);
  EXPECT_EQ(step(MmaUnit::kSm90, 0x1p103f, {0x1p127f, 0x1p127f, -0x1p127f, -0x1p127f}), 0x1p103f);
}

TEST(MmaModel, DotAscendsInSteps) {
  // The unit of 2^26 is 8. Met in the first step it swallows the later ones; in the last step it meets their sum.
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
