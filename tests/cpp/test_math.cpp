// Tests the functions of rlk/math: exp2, exp, expm1, log2, log1p, tanh, sigmoid, logsigmoid, erf.
#define RLK_CPU_ISA math_test

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "cpu/simd.h"  // first, since it decides how the headers of math/ are compiled
#include "rlk/math/erf.h"
#include "rlk/math/exp.h"
#include "rlk/math/exp2.h"
#include "rlk/math/expm1.h"
#include "rlk/math/half.h"
#include "rlk/math/log2.h"
#include "rlk/math/sigmoid.h"
#include "rlk/math/tanh.h"
#include "tests/cpp/ulp.h"

namespace rlk {
namespace {

using cpu::RLK_CPU_ISA::Floats;
using cpu::RLK_CPU_ISA::kLanes;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kTiny = 0x1.0p-149f;  // the smallest subnormal
constexpr float kMax = std::numeric_limits<float>::max();

std::uint32_t hex(float x) { return static_cast<std::uint32_t>(bits_of(x)); }
float of(std::uint32_t bits) { return float_of(static_cast<std::int32_t>(bits)); }

RLK_HD Floats load(const float* x) {
  Floats f;
  for (int l = 0; l < kLanes; ++l) f.v[l] = x[l];
  return f;
}
RLK_HD void store(Floats f, float* y) {
  for (int l = 0; l < kLanes; ++l) y[l] = f.v[l];
}

struct Function {
  const char* name;
  float (*scalar)(float);
  void (*vector)(const float*, float*);  // kLanes values
  double (*exact)(double);
  double worst_ulp;  // from docs/math.md, over all inputs, rounded up
  Small small;
  float low, high;     // its domain; -Inf and +Inf: every input, NaN included
  std::uint64_t hash;  // hash of the outputs for hash_input(0 ... kHashInputs - 1)
  friend void PrintTo(const Function& f, std::ostream* stream) { *stream << f.name; }
};

#define RLK_FUNCTION(name) \
#name, [](float x) { return name(x); }, [](const float* x, float* y) { store(name(load(x)), y); }

double exact_sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double exact_logsigmoid(double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); }
double exact_log2(double x) { return x < 0 ? std::nan("") : std::log2(x); }
double exact_log1p(double x) { return x < -1 ? std::nan("") : std::log1p(x); }
double exact_exp2(double x) { return std::exp2(x); }
double exact_exp(double x) { return std::exp(x); }
double exact_expm1(double x) { return std::expm1(x); }
double exact_tanh(double x) { return std::tanh(x); }
double exact_erf(double x) { return std::erf(x); }

// A new hash means new bits on every backend: change a hash only together with docs/math.md, never to make a build
// pass.
const Function kFunctions[] = {
    {RLK_FUNCTION(exp2), exact_exp2, 0.800, Small::kFlushed, -kInf, kInf, 0x2da4b787af3022c9},
    {RLK_FUNCTION(exp2_normal), exact_exp2, 0.800, Small::kFlushed, -126.0f, 0x1.fffffep+6f, 0x4f42d8d9b9698725},
    {RLK_FUNCTION(exp2_stat), exact_exp2, 42.80, Small::kKept, -0.5f, 0.5f, 0x33275d3c675bb863},
    {RLK_FUNCTION(exp), exact_exp, 1.014, Small::kFlushed, -kInf, kInf, 0xa3cbddc6b3812bb2},
    {RLK_FUNCTION(expm1), exact_expm1, 0.891, Small::kKept, -kInf, kInf, 0x445540076a4e22a1},
    {RLK_FUNCTION(log2), exact_log2, 0.978, Small::kKept, -kInf, kInf, 0x511e72092cba7d7f},
    {RLK_FUNCTION(log1p), exact_log1p, 0.951, Small::kKept, -kInf, kInf, 0xacf8bb3cde67fc6c},
    {RLK_FUNCTION(tanh), exact_tanh, 1.165, Small::kKept, -kInf, kInf, 0x9953dc5292bfdf9e},
    {RLK_FUNCTION(sigmoid), exact_sigmoid, 2.402, Small::kFlushed, -kInf, kInf, 0x921cb26e5b4da25f},
    {RLK_FUNCTION(logsigmoid), exact_logsigmoid, 1.652, Small::kFlushed, -kInf, kInf, 0x5aaa1c0fa1394a59},
    {RLK_FUNCTION(erf), exact_erf, 0.986, Small::kKept, -kInf, kInf, 0xd764987b77989814},
};

bool may_take(const Function& f, float x) { return f.low == -kInf || (x >= f.low && x <= f.high); }

// Half of the inputs spread over all 2^32 bit patterns, infinities and NaNs of every kind included. The other half
// spread over 2^-8 <= |x| < 2^7, where these functions vary. The steps are primes, so every residue of the low bits
// occurs.
constexpr std::uint32_t kHashInputs = 1u << 20;
float hash_input(std::uint32_t i) {
  if (i < kHashInputs / 2) return of(i * 8209u);  // 2^19 steps of 8209 pass 2^32 once
  const std::uint32_t j = i - kHashInputs / 2;
  return of(((j & 1u) << 31) | (0x3b800000u + (j >> 1) * 479u));  // 2^18 steps of 479 fill the 15 binades
}

class MathFunction : public testing::TestWithParam<Function> {};
INSTANTIATE_TEST_SUITE_P(All, MathFunction, testing::ValuesIn(kFunctions),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(MathFunction, ErrorStaysBelowTheContracts) {
  const Function& f = GetParam();
  for (std::uint32_t i = 0; i < kHashInputs; ++i) {
    const float x = hash_input(i);
    if (!may_take(f, x)) continue;
    const double error = error_in_ulp(f.scalar(x), f.exact(x), f.small);
    ASSERT_LE(error, f.worst_ulp) << f.name << " at " << x;
  }
}

// FNV-1a over 32-bit words.
TEST_P(MathFunction, OutputsHaveTheRecordedBits) {
  const Function& f = GetParam();
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::uint32_t i = 0; i < kHashInputs; ++i) {
    const float x = hash_input(i);
    if (may_take(f, x)) hash = (hash ^ hex(f.scalar(x))) * 0x100000001b3u;
  }
  EXPECT_EQ(hash, f.hash) << f.name << std::hex << " 0x" << hash;
}

TEST_P(MathFunction, VectorsHaveTheScalarBits) {
  const Function& f = GetParam();
  for (std::uint32_t i = 0; i < kHashInputs; i += kLanes) {
    float x[kLanes], y[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      x[l] = hash_input(i + static_cast<std::uint32_t>(l));
      if (!may_take(f, x[l])) x[l] = 0.0f;
    }
    f.vector(x, y);
    for (int l = 0; l < kLanes; ++l) ASSERT_EQ(hex(y[l]), hex(f.scalar(x[l]))) << f.name << " at " << x[l];
  }
}

TEST(Math, NanIsCanonical) {
  for (const Function& f : kFunctions) {
    if (!may_take(f, kNan)) continue;
    // NaNs: quiet and signalling, of both signs, with the smallest and the largest payload.
    for (std::uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
      EXPECT_EQ(hex(f.scalar(of(nan))), 0x7fc00000u) << f.name << std::hex << " 0x" << nan;
    }
  }
}

struct Point {
  float x, y;
};
void expect_points(float (*f)(float), const std::vector<Point>& points) {
  for (const Point& p : points) EXPECT_EQ(hex(f(p.x)), hex(p.y)) << "at " << p.x << ": " << f(p.x);
}

TEST(Exp2, IsExactAtIntegers) {
  for (int k = -126; k < 128; ++k) EXPECT_EQ(exp2(static_cast<float>(k)), std::ldexp(1.0f, k)) << k;
}

TEST(Exp2, FlushesBelowTheSmallestNormalAndOverflowsAtTheTop) {
  expect_points([](float x) { return exp2(x); }, {{0.0f, 1.0f},
                                                  {-0.0f, 1.0f},
                                                  {kTiny, 1.0f},
                                                  {-kTiny, 1.0f},
                                                  {-126.0f, 0x1.0p-126f},
                                                  {-0x1.f80002p+6f, 0.0f},  // the next float below -126
                                                  {-127.0f, 0.0f},
                                                  {-149.0f, 0.0f},
                                                  {-kMax, 0.0f},
                                                  {-kInf, 0.0f},
                                                  {128.0f, kInf},
                                                  {kMax, kInf},
                                                  {kInf, kInf}});
  EXPECT_LT(exp2(0x1.fffffep+6f), kInf);  // the last float below 128
}

TEST(Exp, FlushesBelowTheSmallestNormalAndOverflowsAtTheTop) {
  expect_points([](float x) { return exp(x); }, {{0.0f, 1.0f},
                                                 {-0.0f, 1.0f},
                                                 {std::nextafter(kExpSmallest, -kInf), 0.0f},
                                                 {-kMax, 0.0f},
                                                 {-kInf, 0.0f},
                                                 {kExpOverflow, kInf},
                                                 {kMax, kInf},
                                                 {kInf, kInf}});
  EXPECT_GE(exp(kExpSmallest), 0x1.0p-126f);
  EXPECT_LT(exp(std::nextafter(kExpOverflow, 0.0f)), kInf);
}

TEST(Expm1, SpecialValues) {
  expect_points([](float x) { return expm1(x); }, {{0.0f, 0.0f},
                                                   {-0.0f, -0.0f},
                                                   {kTiny, kTiny},
                                                   {-kTiny, -kTiny},
                                                   {0x1.fffffep-26f, 0x1.fffffep-26f},  // just below 2^-25
                                                   {-20.0f, -1.0f},
                                                   {-kMax, -1.0f},
                                                   {-kInf, -1.0f},
                                                   {kExpOverflow, kInf},
                                                   {kMax, kInf},
                                                   {kInf, kInf}});
  EXPECT_LT(expm1(std::nextafter(kExpOverflow, 0.0f)), kInf);
}

TEST(Log2, IsExactAtPowersOfTwo) {
  for (int k = -149; k < 128; ++k) EXPECT_EQ(hex(log2(std::ldexp(1.0f, k))), hex(static_cast<float>(k))) << k;
}

TEST(Log2, SpecialValues) {
  expect_points(
      [](float x) { return log2(x); },
      {{0.0f, -kInf}, {-0.0f, -kInf}, {1.0f, 0.0f}, {-kTiny, kNan}, {-1.0f, kNan}, {-kInf, kNan}, {kInf, kInf}});
}

TEST(Log1p, SpecialValues) {
  expect_points([](float x) { return log1p(x); }, {{0.0f, 0.0f},
                                                   {-0.0f, -0.0f},
                                                   {kTiny, kTiny},
                                                   {-kTiny, -kTiny},
                                                   {-1.0f, -kInf},
                                                   {-0x1.000002p+0f, kNan},  // the next float below -1
                                                   {-kInf, kNan},
                                                   {kMax, 0x1.62e43p+6f},  // 128 ln 2
                                                   {kInf, kInf}});
}

TEST(Tanh, SpecialValues) {
  expect_points([](float x) { return tanh(x); }, {{0.0f, 0.0f},
                                                  {-0.0f, -0.0f},
                                                  {kTiny, kTiny},
                                                  {0x1.0p-126f, 0x1.0p-126f},
                                                  {9.1f, 1.0f},  // 1 - tanh(9.1) < 2^-25
                                                  {kMax, 1.0f},
                                                  {kInf, 1.0f},
                                                  {-kInf, -1.0f}});
}

TEST(Sigmoid, SpecialValues) {
  expect_points([](float x) { return sigmoid(x); }, {{0.0f, 0.5f},
                                                     {-0.0f, 0.5f},
                                                     {kTiny, 0.5f},
                                                     {18.0f, 1.0f},  // 1 - sigmoid(18) < 2^-25
                                                     {kMax, 1.0f},
                                                     {kInf, 1.0f},
                                                     {std::nextafter(kExpSmallest, -kInf), 0.0f},
                                                     {-kMax, 0.0f},
                                                     {-kInf, 0.0f}});
  EXPECT_GE(sigmoid(kExpSmallest), 0x1.0p-126f);
}

TEST(Logsigmoid, SpecialValues) {
  expect_points([](float x) { return logsigmoid(x); }, {{0.0f, -0x1.62e43p-1f},  // -ln 2
                                                        {-0.0f, -0x1.62e43p-1f},
                                                        {88.0f, 0.0f},
                                                        {kInf, 0.0f},
                                                        {-18.0f, -18.0f},  // log1p(e^-18) < 2^-25
                                                        {-kMax, -kMax},
                                                        {-kInf, -kInf}});
  EXPECT_LT(logsigmoid(-kExpSmallest), 0.0f);
}

TEST(Erf, SpecialValues) {
  expect_points([](float x) { return erf(x); }, {{0.0f, 0.0f},
                                                 {-0.0f, -0.0f},
                                                 {kTiny, kTiny},
                                                 {4.0f, 1.0f},  // 1 - erf(4) < 2^-25
                                                 {kMax, 1.0f},
                                                 {kInf, 1.0f},
                                                 {-kInf, -1.0f}});
}

TEST(Math, TanhAndErfAreOddBitForBit) {
  for (std::uint32_t i = 0; i < kHashInputs; ++i) {
    const float x = hash_input(i);
    if (std::isnan(x)) continue;
    ASSERT_EQ(hex(tanh(-x)), hex(tanh(x)) ^ 0x80000000u) << x;
    ASSERT_EQ(hex(erf(-x)), hex(erf(x)) ^ 0x80000000u) << x;
  }
}

TEST(Math, TheMonotonicFunctionsNeverDecrease) {
  for (std::uint32_t i = 0; i < kHashInputs; ++i) {
    const float x = hash_input(i);
    const float next = std::nextafter(x, kInf);
    if (std::isnan(x)) continue;
    ASSERT_LE(expm1(x), expm1(next)) << x;
    ASSERT_LE(tanh(x), tanh(next)) << x;
    ASSERT_LE(erf(x), erf(next)) << x;
    ASSERT_FALSE(log2(x) > log2(next)) << x;  // NaN for negative x
    ASSERT_FALSE(log1p(x) > log1p(next)) << x;
  }
}

TEST(Math, RestrictedFormsHaveTheBitsOfTheFullOnes) {
  for (std::uint32_t i = 0; i < kHashInputs; ++i) {
    const float x = hash_input(i);
    if (x >= -126.0f && x < 128.0f) {
      ASSERT_EQ(hex(exp2_normal(x)), hex(exp2(x))) << x;
    }
    if (x >= kExpSmallest && x < kExpOverflow) {
      ASSERT_EQ(hex(exp_normal(x)), hex(exp(x))) << x;
    }
    if (x <= 0) {
      ASSERT_EQ(hex(exp_nonpositive(x)), hex(exp(x))) << x;
    }
    if (x >= 0x1.0p-126f && x < kInf) {
      ASSERT_EQ(hex(log2_normal(x)), hex(log2(x))) << x;
    }
    if (x > -1 && x < kInf && x != 0) {
      ASSERT_EQ(hex(log1p_finite(x)), hex(log1p(x))) << x;
    }
  }
  EXPECT_EQ(hex(exp_nonpositive(kNan)), 0u);
}

// Tries every reciprocal from which a GPU may start. tests/gpu/test_models.cu checks the reciprocals that a GPU gives.
TEST(Math, DivisionFromAnApproximateReciprocalIsCorrectlyRounded) {
  for (std::uint32_t i = 0; i < 1u << 23; ++i) {
    const float d = of(0x3f800000u + i), right = 1.0f / d;
    for (int ulp = -2; ulp <= 2; ++ulp) {
      const float reciprocal = float_of(bits_of(right) + ulp);
      const float off = fma_rn(reciprocal, d, -1.0f);
      if (abs_of(off) > 0x1.0p-23f || (d == 0x1.fffffep+0f && off < 0)) continue;
      ASSERT_EQ(hex(quotient_of(1.0f, d, reciprocal)), hex(right)) << std::hexfloat << d << ", " << ulp << " ulp";
    }
  }
  for (float e = 0x1.0p-126f; e < 1.0f; e *= 1.000003f) {
    const float d = 1.0f + e, right = 1.0f / d;
    for (int ulp = -1; ulp <= 1; ++ulp) {
      ASSERT_EQ(hex(quotient_of(e, d, float_of(bits_of(right) + ulp))), hex(e / d)) << std::hexfloat << e;
    }
  }
}

// Tries the shorter arithmetic of 16-bit types with every number, and with every reciprocal that a GPU may give.
TEST(Math, TheSigmoidOfEvery16BitNumberNeedsOneNewtonStep) {
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    const auto pattern = static_cast<std::uint16_t>(i);
    for (const float x : {float_of_bf16(pattern), float_of_f16(pattern)}) {
      if (x != x) continue;
      const float e = half_exponential(x), exact = exp_nonpositive(-abs_of(x));
      ASSERT_EQ(hex(abs_of(e) < 0x1.0p-126f ? 0.0f : e), hex(exact)) << std::hexfloat << x;
      const float d = 1.0f + e, right = 1.0f / d;
      ASSERT_EQ(hex(d), hex(1.0f + exact)) << std::hexfloat << x;
      for (int ulp = -2; ulp <= 2; ++ulp) {
        const float reciprocal = float_of(bits_of(right) + ulp);
        const float off = fma_rn(reciprocal, d, -1.0f);
        if (abs_of(off) > 0x1.0p-23f || (d == 0x1.fffffep+0f && off < 0)) continue;
        ASSERT_EQ(hex(short_quotient_of(e, d, reciprocal)), hex(exact / d)) << std::hexfloat << x << ", " << ulp;
        ASSERT_EQ(hex(short_quotient_of(1.0f, d, reciprocal)), hex(right)) << std::hexfloat << x << ", " << ulp;
      }
    }
  }
  EXPECT_EQ(hex(half_exponential(kNan)), hex(half_exponential(-88.0f)));
}

// An instruction that multiplies bfloat16 may replace fp32's product followed by a rounding. The product of two 8-bit
// significands is exact except below 2^-133, where no product is near enough to a tie. Tries every significand and
// exponent of one operand, and many values of the other operand.
TEST(Math, AProductOfBfloat16RoundedTwiceIsRoundedOnce) {
  const auto once = [](double product) {
    int exponent = 0;
    std::frexp(product, &exponent);
    const int last = exponent - 8 < -133 ? -133 : exponent - 8;  // last place of the significand, or of subnormals
    return bf16_rn(static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(product, -last)), last)));
  };
  for (std::uint32_t a = 1; a < 0x7f80; ++a) {
    for (std::uint32_t b = a % 509 + 1; b < 0x7f80; b += 509) {
      const float x = float_of_bf16(static_cast<std::uint16_t>(a)), y = float_of_bf16(static_cast<std::uint16_t>(b));
      if (x * y == kInf) continue;
      ASSERT_EQ(bf16_rn(x * y), once(static_cast<double>(x) * y)) << std::hex << a << " " << b;
    }
  }
}

}  // namespace
}  // namespace rlk
