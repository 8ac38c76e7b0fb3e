// Tools for second implementations of operators over tokens.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "rlk/math/ieee.h"
#include "rlk/tokens.h"
#include "sum_reference.h"

namespace policy_test {

using sum_test::tree;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Shapes: no sequence and no token; one token; a few short odd rows; a tile of each kind and one more token; several
// tiles; many rows.
constexpr std::int64_t kShapes[][2] = {{0, 7},   {3, 0},    {1, 1},    {5, 13},   {70, 3},  {3, 129},
                                       {9, 257}, {2, 1025}, {1, 9000}, {130, 40}, {4, 2500}};

inline float limited(float x, float low, float high) {
  if (low > x) x = low;
  return high < x ? high : x;
}
constexpr float kLargest = std::numeric_limits<float>::max();
inline float cut_at(float x, float most) { return most < x ? most : x; }
// A product, or 0 for zero times infinity.
inline float times(float x, float y) {
  const float product = x * y;
  return std::isnan(product) && !std::isnan(x) && !std::isnan(y) ? 0.0f : product;
}
inline float sum_or_first(float first, float second) {
  const float sum = first + second;
  return std::isnan(sum) && !std::isnan(first) && !std::isnan(second) ? first : sum;
}
inline bool outside(float x, float low, float high) { return x < low || x > high; }
inline float over(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
inline float weighted(float weight, float x) { return weight == 0.0f ? 0.0f : weight * x; }
inline float written(float x) { return std::isnan(x) ? rlk::canonical_nan() : x + 0.0f; }

// A mask with elements of each width, integers and floats.
inline rlk::TokenMask random_mask(const void* data, std::int64_t row_stride, int pick) {
  constexpr struct {
    std::int32_t bytes;
    bool is_float;
  } kKinds[] = {{1, false}, {4, false}, {8, false}, {4, true}, {2, false}, {2, true}, {8, true}};
  return {data, row_stride, kKinds[pick].bytes, kKinds[pick].is_float};
}
constexpr int kMaskKinds = 7, kPlainMaskKinds = 4;  // the first kinds satisfy is_plain_mask
// Sets an element that counts: one, or a number that is nearly zero or has zeros in its low bytes.
inline void set_flag(const rlk::TokenMask& mask, bool is_one, unsigned char* to) {
  const float one = is_one ? 1.0f : 1e-30f;
  const double wide = is_one ? -1.0 : 1e-300;
  const std::uint16_t half = is_one ? 0x3c00 : 0x8001;
  const std::int64_t whole = is_one ? 1 : -7;
  const void* const of_float = mask.bytes == 2   ? static_cast<const void*>(&half)
                               : mask.bytes == 4 ? static_cast<const void*>(&one)
                                                 : &wide;
  std::memcpy(to, mask.is_float ? of_float : &whole, static_cast<std::size_t>(mask.bytes));
}
// Clears an element: 0, or for floats also -0.
inline void clear_flag(const rlk::TokenMask& mask, bool is_minus, unsigned char* to) {
  std::memset(to, 0, static_cast<std::size_t>(mask.bytes));
  if (mask.is_float && is_minus) to[mask.bytes - 1] = 0x80;
}
inline bool is_set(const rlk::TokenMask& mask, std::int64_t i) {
  const auto* const at = static_cast<const unsigned char*>(mask.data) + i * mask.bytes;
  bool any = mask.data == nullptr;
  for (int b = 0; b < mask.bytes && mask.data != nullptr; ++b) {
    any = any || (mask.is_float && b == mask.bytes - 1 ? at[b] & 0x7f : at[b]) != 0;
  }
  return any;
}

// Scaled deviations of a token's values from their mean (kernels/tokens/central_moments.h), by sequence. Values that do
// not count are NaNs with a unique payload.
class Deviations {
 public:
  static float missing() { return rlk::float_of(0x7fabcdef); }

  Deviations(const std::vector<std::vector<float>>& values, float sum, std::int64_t count) : count_(count) {
    float largest = 0.0f;
    for (const auto& of : values) {
      for (const float x : of) {
        if (!is_missing(x) && !(std::fabs(x) <= largest) && !std::isnan(largest)) largest = std::fabs(x);
      }
    }
    scale_ = sum_test::scale_of(largest, largest);
    mean_ = over(sum, static_cast<float>(count)) * scale_.down;
    for (const auto& of : values) {
      std::vector<float> d;
      for (const float x : of) {
        d.push_back(is_missing(x) ? 0.0f : (x * scale_.down - mean_) * scale_.up);
        if (is_missing(x)) continue;
        if (!any_) first_ = d.back();
        any_ = true;
        constant_ = constant_ && d.back() == first_;
      }
      by_sequence.push_back(d);
    }
  }
  static bool is_missing(float x) { return rlk::bits_of(x) == rlk::bits_of(missing()); }

  bool constant() const { return any_ && constant_; }
  float unit() const { return 1.0f / (scale_.down * scale_.up); }
  float mean() const { return mean_ * scale_.up; }
  float difference(float a, float b) const { return (a * scale_.down - b * scale_.down) * scale_.up; }
  float total() const {
    std::vector<float> sums;
    for (const auto& of : by_sequence) sums.push_back(tree(of));
    return tree(sums);
  }
  float products(const Deviations& other) const {
    std::vector<float> sums;
    for (std::size_t s = 0; s < by_sequence.size(); ++s) {
      std::vector<float> terms;
      for (std::size_t i = 0; i < by_sequence[s].size(); ++i)
        terms.push_back(by_sequence[s][i] * other.by_sequence[s][i]);
      sums.push_back(tree(terms));
    }
    return tree(sums);
  }
  float central(const Deviations& other) const {
    return std::fma(-total(), over(other.total(), static_cast<float>(count_)), products(other));
  }
  float square() const {
    const float v = central(*this);
    return constant() || v < 0.0f ? 0.0f : v;
  }

  std::vector<std::vector<float>> by_sequence;

 private:
  std::int64_t count_;
  sum_test::Scale scale_;
  float mean_ = 0.0f, first_ = 0.0f;
  bool any_ = false, constant_ = true;
};

// A workspace of a GPU's kernels, filled with NaN.
class Workspace {
 public:
  explicit Workspace(std::int64_t bytes) : memory_(static_cast<std::size_t>(bytes / 16 + 2), Part{NAN, NAN}) {}
  void* data() { return memory_.data(); }

 private:
  struct alignas(16) Part {
    double v[2];
  };
  std::vector<Part> memory_;
};

inline ::testing::AssertionResult same_bytes(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size()) return ::testing::AssertionFailure() << got.size() << " of " << want.size();
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], 4) == 0) continue;
    return ::testing::AssertionFailure() << "element " << i << " of " << want.size() << ": wanted " << std::hexfloat
                                         << want[i] << ", got " << got[i];
  }
  return ::testing::AssertionSuccess();
}

}  // namespace policy_test
