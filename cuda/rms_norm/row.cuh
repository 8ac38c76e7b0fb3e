// Functions that the forward and the backward of rms_norm share: loads of the weight, and the contract's sum over a
// row.
#pragma once

#include <algorithm>

#include "../common/element_dtype.cuh"
#include "../common/vec8.cuh"
#include "kernels/rows/rms_norm_row.h"

namespace rlk::cuda {
namespace {  // each architecture compiles its own copy of this code

// Loads the weights of eight columns and adds `weight_offset`. The weights have the rows' type or float32. If the call
// has no weight, w becomes 1.
template <class T, bool kVector, class Params>
__device__ __forceinline__ void load_weights(const Params& p, int column, int count, float (&w)[kVec8]) {
#pragma unroll
  for (int j = 0; j < kVec8; ++j) w[j] = 1.0f;
  if (p.weight == nullptr) return;
  if (p.weight_dtype == DType::kFloat32) {
    load_columns<Fp32, kVector>(static_cast<const float*>(p.weight) + column, count, w);
  } else {
    load_columns<T, kVector>(static_cast<const typename T::Storage*>(p.weight) + column, count, w);
  }
#pragma unroll
  for (int j = 0; j < kVec8; ++j) w[j] = rms_norm_weight(w[j], p.weight_offset);
}

// Computes the sums over kRows rows, which kThreads neighbouring threads hold. The contract sums a row by a tree over
// partial sums, called lanes. A thread has L = kCount / kRows lanes of each row: lanes[r * L + j] is lane (thread of
// the row) + j * kThreads of row r. In every thread, lanes[r] becomes the sum of row r. If several warps share a row,
// the function has one barrier of the block. The next call must use another array of_warps [kRows * kSumNodes], since
// slow threads may still read this one.
template <int kThreads, int kRows, int kCount>
__device__ __forceinline__ void row_sums(float (&lanes)[kCount], float* of_warps) {
  constexpr int kInWarp = kThreads < 32 ? kThreads : 32, kWarps = kThreads / kInWarp;
  constexpr int kLanes = kCount / kRows, kNodes = kLanes * kWarps;  // lanes and nodes per row
#pragma unroll
  for (int distance = 1; distance < kInWarp; distance *= 2) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      lanes[j] = __fadd_rn(lanes[j], __shfl_xor_sync(0xffffffff, lanes[j], distance));
    }
  }
  float node[kRows][kNodes];
  if constexpr (kWarps == 1) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) node[j / kLanes][j % kLanes] = lanes[j];
  } else {
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    if (thread % 32 == 0) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) of_warps[j * kWarps + thread / 32] = lanes[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows * kNodes; ++i) node[i / kNodes][i % kNodes] = of_warps[i];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int distance = 1; distance < kNodes; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kNodes; i += 2 * distance) node[r][i] = __fadd_rn(node[r][i], node[r][i + distance]);
    }
    lanes[r] = __fadd_rn(node[r][0], 0.0f);  // turns -0 into +0
  }
}
// Returns the sum over a single row.
template <int kThreads, int kCount>
__device__ __forceinline__ float row_sum(float (&lanes)[kCount], float* of_warps) {
  row_sums<kThreads, 1>(lanes, of_warps);
  return lanes[0];
}
template <int kThreads, int kCount>
constexpr int kSumNodes = kCount*(kThreads < 32 ? 1 : kThreads / 32);

}  // namespace
}  // namespace rlk::cuda
