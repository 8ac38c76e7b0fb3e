// embedding forward. Bound by HBM: for each token a row of the table is read, and a row of y is written.
//
// embedding_kernel: `lanes` threads copy a row or a slice of a row. Each thread copies kCount units, `lanes` units
//   apart, and loads all of them before it stores the first unit. Short rows share a block. A unit is 16 bytes, or one
//   element if rows are not aligned to 16 bytes. All lanes that copy a row read the token's id at the same time. The id
//   decides whether the row exists.
// All architectures share this source; each has its own machine code.
#include <algorithm>

#include "../common/dependent_launch.cuh"
#include "../common/vec8.cuh"
#include "kernels.h"
#include "kernels/rows/embedding_copy.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kCopyThreads = 128;

__device__ __forceinline__ uint4 load_unit(const uint4* from) { return load_in_order(from); }
template <class Unit>
__device__ __forceinline__ Unit load_unit(const Unit* from) {
  return *from;
}
__device__ __forceinline__ void store_unit(uint4* to, uint4 x) { __stcs(to, x); }
template <class Unit>
__device__ __forceinline__ void store_unit(Unit* to, Unit x) {
  *to = x;
}
__device__ __forceinline__ void fill_unit(uint4* x, std::uint32_t pattern) {
  *x = make_uint4(pattern, pattern, pattern, pattern);
}
template <class Unit>
__device__ __forceinline__ void fill_unit(Unit* x, std::uint32_t pattern) {
  *x = static_cast<Unit>(pattern);
}

template <class Unit, int kCount>
__global__ void __launch_bounds__(kCopyThreads)
    embedding_kernel(const __grid_constant__ EmbeddingParams p, const __grid_constant__ EmbeddingCopyGrid g,
                     std::int64_t first_block) {
  const EmbeddingCopyPlace place(g, first_block + blockIdx.x, threadIdx.x, kCopyThreads, kCount);
  allow_next_kernel();
  wait_for_previous_kernel();
  if (place.token >= p.num_tokens) return;
  const std::int64_t id = embedding_id(p, place.token), row = embedding_row(p, id);
  const int bytes = size_of(p.dtype);
  Unit* to = reinterpret_cast<Unit*>(static_cast<char*>(p.y) + place.token * p.y_stride * bytes);
  Unit x[kCount];
  if (row < p.num_rows) {
    const Unit* from =
        reinterpret_cast<const Unit*>(static_cast<const char*>(p.weight) + row * p.weight_stride * bytes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::uint32_t at = place.first + i * place.step;
      if (at < g.units) x[i] = load_unit(from + at);
    }
  } else {
    const std::uint32_t pattern = embedding_fill(p.dtype, embedding_is_bad(p, id));
#pragma unroll
    for (int i = 0; i < kCount; ++i) fill_unit(&x[i], pattern);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const std::uint32_t at = place.first + i * place.step;
    if (at < g.units) store_unit(to + at, x[i]);
  }
}

template <bool kOverlap, class Unit, int kCount>
void run_copy(const EmbeddingParams& p, cudaStream_t stream) {
  const EmbeddingCopyGrid g = embedding_copy_grid(p, sizeof(Unit), kCount, kCopyThreads);
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
  for (std::int64_t first = 0; first < g.blocks; first += kMostBlocks) {
    const int count = static_cast<int>(std::min(kMostBlocks, g.blocks - first));
    launch_dependent<kOverlap>(embedding_kernel<Unit, kCount>, count, kCopyThreads, 0, stream, p, g, first);
  }
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void embedding(const EmbeddingParams& p, const EmbeddingPlan& plan, cudaStream_t stream) {
  if (plan.vectors == 2) {
    run_copy<kOverlap, uint4, 2>(p, stream);
  } else if (plan.vectors == 1) {
    run_copy<kOverlap, uint4, 1>(p, stream);
  } else if (p.dtype == DType::kFloat32) {
    run_copy<kOverlap, std::uint32_t, 4>(p, stream);
  } else {
    run_copy<kOverlap, std::uint16_t, 4>(p, stream);
  }
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
