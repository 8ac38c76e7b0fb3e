// From global to shared memory: one stage of an operand, by cp.async where all of its rows begin at 16 bytes, else
// element by element.
#pragma once

#include <cstdint>

#include "../common/async_copy_groups_sm80.cuh"
#include "../common/mma_sm80.cuh"
#include "../common/shared_tile.cuh"
#include "gemm.h"

namespace rlk::cuda {
namespace {  // one copy per architecture

// `count` of the 8 elements of a chunk; the others become 0.
__device__ __forceinline__ void copy_elements(std::uint32_t shared, const std::uint16_t* from, int count) {
  std::uint32_t word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t low = 2 * j < count ? from[2 * j] : 0, high = 2 * j + 1 < count ? from[2 * j + 1] : 0;
    word[j] = low | high << 16;
  }
  store_shared_16(shared, make_uint4(word[0], word[1], word[2], word[3]));
}

template <class Integer>
__device__ __forceinline__ int clamp(Integer x, int most) {
  return x <= 0 ? 0 : x >= most ? most : static_cast<int>(x);
}

// A thread's chunks of the stages of one operand: a chunk of every kRowStep-th row of the tile.
template <class Tile, bool kContraction, int kThreads>
class OperandLoad {
 public:
  // `first`: of the tile in the operand's extent.
  __device__ __forceinline__ OperandLoad(const GemmOperand& x, std::int64_t extent, std::int64_t first, bool vector)
      : x_(x), first_(first), vector_(vector) {
    if constexpr (kContraction) {
      inside_ = clamp(extent - first, Tile::kRows);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) from_[i] = row_start(i);
    } else {
      inside_ = clamp(extent - first - 8 * chunk(), 8);
      from_[0] = data() + first + 8 * chunk();
    }
  }

  // Indices [k, k + left) of the contraction to the stage at `shared`, zeros after them.
  __device__ __forceinline__ void load(std::uint32_t shared, std::int64_t k, int left) const {
    if (vector_) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int count = elements(i, left);
        const std::uint16_t* from = kContraction ? from_[i] + k : chunk_start(i, k, count);
        copy_async_16_or_less(shared + offset(i), from, count * 2);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunks; ++i) {
        const int count = elements(i, left);
        const std::uint16_t* from = kContraction ? row_start(i) + k : chunk_start(i, k, count);
        copy_elements(shared + offset(i), from, count);
      }
    }
  }

 private:
  static constexpr int kChunks = Tile::kRows * Tile::kRowChunks / kThreads, kRowStep = kThreads / Tile::kRowChunks;
  static_assert(kChunks * kThreads == Tile::kRows * Tile::kRowChunks && kRowStep * Tile::kRowChunks == kThreads);

  __device__ __forceinline__ const std::uint16_t* data() const { return static_cast<const std::uint16_t*>(x_.data); }
  __device__ __forceinline__ int chunk() const { return static_cast<int>(threadIdx.x) % Tile::kRowChunks; }
  __device__ __forceinline__ int row(int i) const {
    return static_cast<int>(threadIdx.x) / Tile::kRowChunks + i * kRowStep;
  }
  __device__ __forceinline__ int offset(int i) const { return Tile::offset(row(i), chunk()); }

  // Rows along the contraction: this thread's chunk of a row of the operand, at k = 0; anything past the extent.
  __device__ __forceinline__ const std::uint16_t* row_start(int i) const {
    return row(i) < inside_ ? data() + x_.rows.offset(first_ + row(i)) + 8 * chunk() : data();
  }
  // Rows along the extent: this thread's chunk of contraction index k + row(i), if there is one.
  __device__ __forceinline__ const std::uint16_t* chunk_start(int i, std::int64_t k, int count) const {
    return count > 0 ? from_[0] + x_.rows.offset(k + row(i)) : data();
  }
  __device__ __forceinline__ int elements(int i, int left) const {
    if constexpr (kContraction) return row(i) < inside_ ? clamp(left - 8 * chunk(), 8) : 0;
    return row(i) < left ? inside_ : 0;
  }

  const GemmOperand& x_;
  const std::int64_t first_;
  const bool vector_;
  const std::uint16_t* from_[kContraction ? kChunks : 1];
  int inside_;  // the extent: rows of the tile that are in it, or elements of this thread's chunk of each row
};

}  // namespace
}  // namespace rlk::cuda
