// embedding forward. Bound by HBM: a row of the table is read and a row of y written for each token.
//
// embedding_kernel: `lanes` threads copy a row or a slice of one, each kCount units at a stride of lanes, all of them asked
// for before the first is written; a block has several rows where they are short. A unit is 16 bytes or, at other
// alignments, an element. The id is read once by all lanes of its row together, and decides whether there is a row at all.
// One body for every architecture; each gets its own machine code.
#pragma once

#include <algorithm>
#include <bit>

#include "../common/octet.cuh"
#include "kernels.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kCopyThreads = 128;

struct CopyGrid {
  std::int64_t first_block;
  std::uint32_t units, lanes_log2, slices;  // units of a row; slices of a row, a block or less each
};

__device__ __forceinline__ uint4 load_unit(const uint4* from) { return load_once(from); }
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
    embedding_kernel(const __grid_constant__ EmbeddingParams p, const __grid_constant__ CopyGrid g) {
  const std::int64_t block = g.first_block + blockIdx.x;
  const std::int64_t rows_block = g.slices == 1 ? block : block / g.slices;
  const std::uint32_t slice = g.slices == 1 ? 0 : static_cast<std::uint32_t>(block - rows_block * g.slices);
  const std::uint32_t lanes = 1u << g.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const std::int64_t token = (rows_block << (std::countr_zero(static_cast<unsigned>(kCopyThreads)) - g.lanes_log2)) +
                             (threadIdx.x >> g.lanes_log2);
  if (token >= p.num_tokens) return;
  const std::int64_t id = embedding_id(p, token), row = embedding_row(p, id);
  const std::uint32_t first = slice * lanes * kCount + lane;
  const int bytes = size_of(p.dtype);
  Unit* to = reinterpret_cast<Unit*>(static_cast<char*>(p.y) + token * p.y_stride * bytes);
  Unit x[kCount];
  if (row < p.num_rows) {
    const Unit* from =
        reinterpret_cast<const Unit*>(static_cast<const char*>(p.weight) + row * p.weight_stride * bytes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::uint32_t at = first + i * lanes;
      if (at < g.units) x[i] = load_unit(from + at);
    }
  } else {
    std::uint32_t pattern = 0;
    if (embedding_is_bad(p, id)) pattern = p.dtype == DType::kFloat32 ? 0x7fc00000u : 0x7fff7fffu;
#pragma unroll
    for (int i = 0; i < kCount; ++i) fill_unit(&x[i], pattern);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const std::uint32_t at = first + i * lanes;
    if (at < g.units) store_unit(to + at, x[i]);
  }
}

template <class Unit, int kCount>
void run_copy(const EmbeddingParams& p, cudaStream_t stream) {
  const std::int64_t units = p.columns * size_of(p.dtype) / static_cast<std::int64_t>(sizeof(Unit));
  const std::uint32_t wanted =
      static_cast<std::uint32_t>(std::min<std::int64_t>((units + kCount - 1) / kCount, kCopyThreads));
  CopyGrid g{};
  g.units = static_cast<std::uint32_t>(units);
  const std::uint32_t lanes = std::bit_ceil(wanted);
  g.lanes_log2 = static_cast<std::uint32_t>(std::countr_zero(lanes));
  g.slices = static_cast<std::uint32_t>((units + lanes * kCount - 1) / (lanes * kCount));
  const std::int64_t rows = kCopyThreads / lanes;
  const std::int64_t blocks = (p.num_tokens + rows - 1) / rows * g.slices;
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 30;
  for (; g.first_block < blocks; g.first_block += kMostBlocks) {
    const unsigned count = static_cast<unsigned>(std::min(kMostBlocks, blocks - g.first_block));
    embedding_kernel<Unit, kCount><<<count, kCopyThreads, 0, stream>>>(p, g);
    check(cudaGetLastError(), "launch of embedding");
  }
}

inline void run_embedding(const EmbeddingParams& p, const EmbeddingPlan& plan, cudaStream_t stream) {
  if (plan.vectors == 4) {
    run_copy<uint4, 4>(p, stream);
  } else if (plan.vectors == 1) {
    run_copy<uint4, 1>(p, stream);
  } else if (p.dtype == DType::kFloat32) {
    run_copy<std::uint32_t, 4>(p, stream);
  } else {
    run_copy<std::uint16_t, 4>(p, stream);
  }
}

}  // namespace
}  // namespace rlk::cuda
