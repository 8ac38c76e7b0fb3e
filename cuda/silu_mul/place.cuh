// What forward and backward of silu_mul share: where a thread is, and rows by their address.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/vec8.cuh"
#include "kernels.h"
#include "rlk/kernels/row_split.h"
#include "rlk/kernels/silu_mul_activation.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

constexpr int kLog2Block = 7, kGatedBlock = 1 << kLog2Block;  // short blocks, which the scheduler spreads evenly

template <int kCount>
__device__ __forceinline__ RowPlace place(const RowSplit& split) {
  return place_in_rows(split, kCount, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <class T>
__device__ __forceinline__ const typename T::Storage* row_of(const void* base, std::int64_t offset) {
  return static_cast<const typename T::Storage*>(base) + offset;
}
template <class T>
__device__ __forceinline__ typename T::Storage* row_of(void* base, std::int64_t offset) {
  return static_cast<typename T::Storage*>(base) + offset;
}

// Launches a kernel whose threads have `count` items of each row's `items`, and whose blocks `chunks` chunks.
template <bool kOverlap, class Params>
void launch_over_rows(void (*kernel)(Params, RowSplit), const Params& p, std::int64_t items, int count, int chunks,
                      cudaStream_t stream) {
  const RowSplit split = split_rows(items, count, kLog2Block);
  const unsigned all = checked_blocks(blocks_of(split, p.num_rows), "silu_mul");
  const int blocks = static_cast<int>((all - 1) / static_cast<unsigned>(chunks) + 1);
  launch_dependent<kOverlap>(kernel, blocks, kGatedBlock, 0, stream, p, split);
}

}  // namespace
}  // namespace rlk::cuda
