// Copies rows of 16-bit elements, which may begin at any element, to rows at multiples of 16 bytes. A thread copies a
// few vectors of 16 bytes. For each vector, the thread loads two aligned vectors and shifts their words. Bound by HBM.
#include "../common/dependent_launch.cuh"
#include "gemm_copies.h"
#include "kernels/rows/row_split.h"
#include "row_vectors.cuh"

namespace rlk::cuda {
namespace {

constexpr int kVectors = 4, kLog2Threads = 8;

__global__ void __launch_bounds__(1 << kLog2Threads, 4)
    aligned_rows_kernel(const __grid_constant__ AlignedRowsParams p, const RowSplit split) {
  wait_for_previous_kernel();
  allow_next_kernel();  // not before the wait: the next kernel reads results of earlier kernels without a wait
  const RowPlace place = place_in_rows(split, kVectors, blockIdx.x, static_cast<int>(threadIdx.x));
  if (place.row >= p.rows) return;
  const auto* const from = static_cast<const std::uint16_t*>(p.from) + p.from_rows.offset(p.first_row + place.row);
  auto* const to = static_cast<std::uint16_t*>(p.to) + place.row * p.pitch;
  const auto shift = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(from) % 16);
  const auto* const aligned = reinterpret_cast<const uint4*>(reinterpret_cast<std::uintptr_t>(from) - shift);
  const int columns = static_cast<int>(p.columns), vectors = static_cast<int>(p.pitch / kPerVector);
  const auto is_inner = [&](int v) { return is_inner_vector(v, shift, columns); };
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
      out = vector_of_elements(from, v, columns);
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
  launch_dependent<kOverlap>(aligned_rows_kernel, static_cast<int>(blocks), 1 << kLog2Threads, 0, stream, p, split);
}

}  // namespace RLK_CUDA_ARCH
}  // namespace rlk::cuda
