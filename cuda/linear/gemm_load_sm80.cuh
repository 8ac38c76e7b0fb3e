// Loads one stage of an operand from global to shared memory. If all rows of the operand begin at multiples of 16
// bytes, cp.async loads them; otherwise they are loaded element by element.
#pragma once

#include <cstdint>

#include "../common/async_copy_groups_sm80.cuh"
#include "../common/mma_sm80.cuh"
#include "../common/shared_tile.cuh"
#include "gemm.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kChunkElements = 8, kChunkBytes = 16;

// Copies the first `count` elements of a chunk and sets its other elements to 0.
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

// Loads a thread's chunks of one operand's stages. The thread has one chunk of every kRowStep-th row of the tile.
template <class Tile, bool kContraction, int kThreads>
class OperandLoad {
 public:
  // `first`: the tile's first index in the operand's extent (the index that is not contracted). `vector`: all rows of
  // the operand begin at multiples of 16 bytes, and rows_ can hold their offsets.
  __device__ __forceinline__ OperandLoad(const GemmOperand& x, std::int64_t extent, std::int64_t first, bool vector)
      : x_(x), first_(first), to_(Tile::offset(row(0), chunk())), vector_(vector) {
    if constexpr (kContraction) {
      inside_ = clamp(extent - first, Tile::kRows);
      start_ = address(data() + kChunkElements * chunk());
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        rows_[i] = row(i) < inside_ ? static_cast<int>(x_.rows.offset(first_ + row(i)) / kChunkElements) : 0;
      }
      whole_ = vector && inside_ == Tile::kRows;
    } else {
      inside_ = clamp(extent - first - kChunkElements * chunk(), kChunkElements);
      start_ = address(data() + first + kChunkElements * chunk());
      whole_ = vector && extent - first >= Tile::kRowChunks * kChunkElements;
    }
  }

  // Number of this thread's chunks in a stage. If `has_whole(k, left)` is true, the thread copies whole chunks. If the
  // extent is the contiguous index, the last chunk of a row may reach past the extent.
  static constexpr int kChunks = Tile::kRows * Tile::kRowChunks / kThreads;
  // All threads of the block get the same result.
  __device__ __forceinline__ bool has_whole(std::int64_t k, int left) const {
    return whole_ && left == kStageK && (kContraction || in_one_run(k));
  }
  __device__ __forceinline__ std::uint64_t start(std::int64_t k) const {
    return start_ + (kContraction ? k : x_.rows.offset(k + row(0))) * 2;
  }
  // `from`: the result of start(k). If `count` is 0, the function reads nothing.
  __device__ __forceinline__ void copy_chunk(int i, std::uint32_t shared, std::uint64_t from,
                                             int count = kChunkElements) const {
    const std::int64_t to_row =
        kContraction ? std::int64_t{rows_[i]} * kChunkBytes : i * kRowStep * x_.rows.inner_stride * 2;
    copy_async_16_or_less(shared + offset(i), reinterpret_cast<const void*>(from + to_row), count * 2);
  }

  // Copies indices [k, k + left) of the contraction to the stage at `shared`, and zeros after these indices.
  __device__ __forceinline__ void load(std::uint32_t shared, std::int64_t k, int left) const {
    if (has_whole(k, left)) {
      const std::uint64_t from = start(k);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) copy_chunk(i, shared, from);
    } else if (vector_ && kContraction) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) copy_chunk(i, shared, start(k), elements(i, left));
    } else if (vector_) {
#pragma unroll 1
      for (int i = 0; i < kChunks; ++i) {
        const int count = elements(i, left);
        copy_async_16_or_less(shared + offset(i), count > 0 ? chunk_start(i, k) : data(), count * 2);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kChunks; ++i) {
        const int count = elements(i, left);
        copy_elements(shared + offset(i), count > 0 ? chunk_start(i, k) : data(), count);
      }
    }
  }

 private:
  static constexpr int kStageK = kContraction ? Tile::kRowChunks * kChunkElements : Tile::kRows;
  static constexpr int kRowStep = kThreads / Tile::kRowChunks;
  static_assert(kChunks * kThreads == Tile::kRows * Tile::kRowChunks && kRowStep * Tile::kRowChunks == kThreads);

  __device__ __forceinline__ const std::uint16_t* data() const { return static_cast<const std::uint16_t*>(x_.data); }
  static __device__ __forceinline__ std::uint64_t address(const void* p) { return reinterpret_cast<std::uint64_t>(p); }
  __device__ __forceinline__ int chunk() const { return static_cast<int>(threadIdx.x) % Tile::kRowChunks; }
  __device__ __forceinline__ int row(int i) const {
    return static_cast<int>(threadIdx.x) / Tile::kRowChunks + i * kRowStep;
  }
  __device__ __forceinline__ int offset(int i) const {
    return kRowStep % Tile::kKeyRows == 0 ? to_ + i * kRowStep * Tile::kRowBytes : Tile::offset(row(i), chunk());
  }

  // Whether all rows of the stage at k have the same stride.
  __device__ __forceinline__ bool in_one_run(std::int64_t k) const {
    const std::int64_t n = x_.rows.inner;
    return (k < n ? k : static_cast<std::uint32_t>(k) % static_cast<std::uint32_t>(n)) + kStageK <= n;
  }
  // Address of this thread's chunk of row(i). The chunk must not be empty.
  __device__ __forceinline__ const std::uint16_t* chunk_start(int i, std::int64_t k) const {
    return reinterpret_cast<const std::uint16_t*>(
        start_ + (kContraction ? x_.rows.offset(first_ + row(i)) + k : x_.rows.offset(k + row(i))) * 2);
  }
  __device__ __forceinline__ int elements(int i, int left) const {
    if constexpr (kContraction) return row(i) < inside_ ? clamp(left - kChunkElements * chunk(), kChunkElements) : 0;
    return row(i) < left ? inside_ : 0;
  }

  const GemmOperand& x_;
  const std::int64_t first_;
  // Address of this thread's chunk of row 0 of the operand. The address is an integer, because nvcc would compute a
  // pointer again for each chunk, in elements from the operand's beginning.
  std::uint64_t start_;
  int rows_[kContraction ? kChunks : 1];  // distance in chunks from row 0 of the operand to row(i)
  const int to_;
  int inside_;  // number of the tile's rows, or of elements in this thread's chunk of a row, inside the extent
  const bool vector_;
  bool whole_;  // stages of kStageK are copied without tests of the extent
};

}  // namespace
}  // namespace rlk::cuda
