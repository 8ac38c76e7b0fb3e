// Loads vectors of 16 bytes from rows of 16-bit elements that may begin at any element. Inside a row, two aligned loads
// and a shift give a vector.
#pragma once

#include <cstdint>

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kPerVector = 8;  // elements

// The eight elements that begin at byte `shift` (even, below 16) of two adjacent vectors.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, unsigned shift) {
  std::uint32_t x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (shift & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) x[i] = x[i + 2];
  }
  if (shift & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) x[i] = x[i + 1];
  }
  const unsigned bits = (shift & 2) * 8;
  return {__funnelshift_r(x[0], x[1], bits), __funnelshift_r(x[1], x[2], bits), __funnelshift_r(x[2], x[3], bits),
          __funnelshift_r(x[3], x[4], bits)};
}

// Whether the two aligned loads for a row's vector v stay inside the row. The row begins `shift` bytes after an aligned
// address. If `shift` is 0, a vector takes only one load.
__device__ __forceinline__ bool is_inner_vector(int v, unsigned shift, int columns) {
  const int before = static_cast<int>(shift) / 2;
  return shift == 0 ? (v + 1) * kPerVector <= columns : v > 0 && (v + 2) * kPerVector - before <= columns;
}
// Loads vector v of a row that begins at `from`, element by element. Elements after the row's end are zeros.
__device__ __forceinline__ uint4 vector_of_elements(const std::uint16_t* from, int v, int columns) {
  std::uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int c = v * kPerVector + 2 * j;
    words[j] = (c < columns ? from[c] : 0u) | (c + 1 < columns ? std::uint32_t{from[c + 1]} << 16 : 0u);
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace
}  // namespace rlk::cuda
