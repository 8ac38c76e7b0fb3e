// What second implementations of operators over tokens are written with.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "rlk/math/ieee.h"
#include "rlk/policy_sequences.h"
#include "sum_reference.h"

namespace policy_test {

using sum_test::tree;

constexpr float kInf = std::numeric_limits<float>::infinity();

// No sequence and no token; one; a few short ones, odd; a tile of each kind and one more token; several tiles; many.
constexpr std::int64_t kShapes[][2] = {{0, 7},   {3, 0},    {1, 1},    {5, 13},   {70, 3},  {3, 129},
                                       {9, 257}, {2, 1025}, {1, 9000}, {130, 40}, {4, 2500}};

inline float limited(float x, float low, float high) {
  if (low > x) x = low;
  return high < x ? high : x;
}
constexpr float kLargest = std::numeric_limits<float>::max();
inline float cut_at(float x, float most) { return most < x ? most : x; }
// Of a zero and an infinity 0.
inline float times(float x, float y) {
  const float product = x * y;
  return std::isnan(product) && !std::isnan(x) && !std::isnan(y) ? 0.0f : product;
}
inline bool outside(float x, float low, float high) { return x < low || x > high; }
inline float over(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
inline float written(float x) { return std::isnan(x) ? rlk::canonical_nan() : x + 0.0f; }

inline bool is_set(const rlk::PolicyMask& mask, std::int64_t i) {
  if (mask.data == nullptr) return true;
  switch (mask.dtype) {
    case rlk::DType::kInt32:
      return static_cast<const std::int32_t*>(mask.data)[i] != 0;
    case rlk::DType::kInt64:
      return static_cast<const std::int64_t*>(mask.data)[i] != 0;
    case rlk::DType::kFloat32:
      return static_cast<const float*>(mask.data)[i] != 0.0f;
    default:
      return static_cast<const std::uint8_t*>(mask.data)[i] != 0;
  }
}

// A workspace of a GPU's kernels, which holds NaN.
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
