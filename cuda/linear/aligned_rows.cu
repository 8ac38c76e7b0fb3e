// Copies rows of 16-bit elements, wherever they begin, to rows at multiples of 16 bytes. A thread makes a few vectors
// of 16 bytes; it loads each as two aligned vectors and shifts them. Bound by HBM.
#include "../common/launch.h"
#include "gemm_copies.h"
#include "rlk/kernels/row_split.h"

namespace rlk::cuda {
namespace {

constexpr int kVectors = 4, kLog2Threads = 8, kPerVector = 8;

// Eight elements from byte `shift` (even, below 16) of two vectors on.
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

__global__ void __launch_bounds__(1 << kLog2Threads)
    aligned_rows_kernel(const __grid_constant__ AlignedRowsParams p, const RowSplit split) {
  const RowPlace place = place_in_rows(split, kVectors, blockIdx.x, static_cast<int>(threadIdx.x));
  if (place.row >= p.rows) return;
  const auto* const from = static_cast<const std::uint16_t*>(p.from) + p.from_rows.offset(p.first_row + place.row);
  auto* const to = static_cast<std::uint16_t*>(p.to) + place.row * p.pitch;
  const auto shift = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(from) % 16);
  const auto* const aligned = reinterpret_cast<const uint4*>(reinterpret_cast<std::uintptr_t>(from) - shift);
  const int columns = static_cast<int>(p.columns), vectors = static_cast<int>(p.pitch / kPerVector);
  const int before = static_cast<int>(shift) / 2;  // elements between the aligned address and the row
  // Vectors whose two loads stay inside the row.
  const auto is_inner = [&](int v) {
    return shift == 0 ? (v + 1) * kPerVector <= columns : v > 0 && (v + 2) * kPerVector - before <= columns;
  };
  uint4 low[kVectors], high[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = place.first + i * place.step;
    if (v < vectors && is_inner(v)) {
      low[i] = __ldg(aligned + v);
      high[i] = shift == 0 ? uint4{} : __ldg(aligned + v + 1);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = place.first + i * place.step;
    if (v >= vectors) continue;
    uint4 out;
    if (is_inner(v)) {
      out = shifted(low[i], high[i], shift);
    } else {
      std::uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int c = v * kPerVector + 2 * j;
        words[j] = (c < columns ? from[c] : 0u) | (c + 1 < columns ? std::uint32_t{from[c + 1]} << 16 : 0u);
      }
      out = {words[0], words[1], words[2], words[3]};
    }
    reinterpret_cast<uint4*>(to)[v] = out;
  }
}

}  // namespace

namespace RLK_CUDA_ARCH {

void aligned_rows(const AlignedRowsParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.pitch == 0) return;
  const RowSplit split = split_rows(p.pitch / kPerVector, kVectors, kLog2Threads);
  const std::int64_t blocks = blocks_of(split, p.rows);
  RLK_CHECK(blocks < std::int64_t{1} << 31, "linear: too many rows to copy in one launch");
  aligned_rows_kernel<<<static_cast<unsigned>(blocks), 1 << kLog2Threads, 0, stream>>>(p, split);
  check(cudaGetLastError(), "launch of aligned_rows");
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
