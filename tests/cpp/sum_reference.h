// A second implementation of the sum of docs/numerics.md, rule 10. Second implementations of every operator use it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace sum_test {

// The perfect binary tree over terms [first, first + width), width a power of two; missing terms are +0.
inline float tree(const std::vector<float>& terms, std::size_t first, std::size_t width) {
  if (first >= terms.size()) return 0.0f;
  if (width == 1) return terms[first];
  return tree(terms, first, width / 2) + tree(terms, first + width / 2, width / 2);
}
inline float tree(const std::vector<float>& terms) {
  std::size_t width = 1;
  while (width < terms.size()) width *= 2;
  return tree(terms, 0, width);
}

// The scales of math/moment_scale.h, from the exponent of the largest magnitude.
struct Scale {
  float down = 1.0f, up = 1.0f;
};
inline Scale scale_of(float least, float largest) {
  const float most = std::max(std::fabs(least), std::fabs(largest));
  const int k = most == 0.0f ? -126 : std::isinf(most) ? 126 : std::clamp(std::ilogb(most), -126, 126);
  return {std::ldexp(1.0f, -std::max(k, 0)), std::ldexp(1.0f, -std::min(k, 0))};
}

}  // namespace sum_test
