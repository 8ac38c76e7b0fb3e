// Loads rows of 16-bit elements that TMA cannot read, because the rows may begin at any element. By cp.async, threads
// copy the whole memory lines that contain a row to a ring in shared memory. A reader finds each row at its own offset,
// and shifts the words of a matrix fragment in registers.
#pragma once

#include <cstdint>

#include "../common/async_copy_groups_sm80.cuh"
#include "../common/async_copy_sm80.cuh"
#include "../common/mbarrier_sm90.cuh"
#include "gemm_launch.h"

namespace rlk::cuda {

constexpr int kLine = 128;  // bytes; a row's stream begins at the line that contains its first element

__device__ __forceinline__ std::uint64_t row_address(const RowStreams& rows, int r) {
  return rows.data + r * rows.stride;
}
// Number of bytes in a row's stream before the row begins.
__device__ __forceinline__ int row_shift(const RowStreams& rows, int r) {
  return static_cast<int>(row_address(rows, r)) & (kLine - 1);
}

// kThreads threads together copy piece `piece`, of kPiece bytes, of rows [first, first + rows). This function begins the
// copies of thread `thread`. The rows' pieces lie `pitch` bytes apart from `to` on. If `again` is not 0, the piece's
// first line is also copied `again` bytes further. Bytes after a row's end become zeros. Rows that do not exist are
// skipped, because no stored result depends on them.
template <int kPiece, int kThreads>
__device__ __forceinline__ void begin_row_copies(const RowStreams& from, int first, int rows, int piece,
                                                 std::uint32_t to, int pitch, int thread, int again = 0) {
  constexpr int kOfPiece = kPiece / 16, kStep = kThreads / kOfPiece;  // vectors; rows
  const int vector = thread % kOfPiece, at = piece * kPiece + vector * 16;
  const bool twice = again > 0 && vector < kLine / 16;
  rows = min(rows, from.rows - first);
  int i = thread / kOfPiece;
  std::uint64_t row = row_address(from, first + i);
  const std::int64_t step = kStep * from.stride;
  to += vector * 16 + i * pitch;
  if (piece > 0 && (piece + 1) * kPiece <= from.bytes) {  // no row begins or ends in this piece
#pragma unroll(kThreads == 32 ? 8 : 4)
    for (; i < rows; i += kStep, row += step, to += kStep * pitch) {
      const auto* const address = reinterpret_cast<const void*>((row & ~std::uint64_t{kLine - 1}) + at);
      copy_async_16(to, address);
      if (twice) copy_async_16(to + again, address);
    }
    return;
  }
#pragma unroll 1
  for (; i < rows; i += kStep, row += step, to += kStep * pitch) {
    const int shift = static_cast<int>(row) & (kLine - 1);
    const int bytes = at + 16 > shift ? min(max(shift + from.bytes - at, 0), 16) : 0;
    const auto* const address = reinterpret_cast<const void*>(bytes > 0 ? row - shift + at : row & ~std::uint64_t{15});
    copy_async_16_or_less(to, address, bytes);
    if (twice) copy_async_16_or_less(to + again, address, bytes);
  }
}
// Prefetches the lines of piece `piece` into L2.
template <int kPiece, int kThreads>
__device__ __forceinline__ void prefetch_rows(const RowStreams& from, int first, int rows, int piece, int thread) {
  constexpr int kLines = kPiece / kLine;
  const int at = piece * kPiece + thread % kLines * kLine;
  for (int i = thread / kLines; i < rows; i += kThreads / kLines) {
    const int shift = row_shift(from, first + i);
    if (first + i >= from.rows || at >= shift + from.bytes) continue;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row_address(from, first + i) + max(at - shift, 0)) : "memory");
  }
}

__device__ __forceinline__ std::uint32_t shared_word(std::uint32_t at) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

// For each row's stream, a ring of 2^kLogPieces pieces of kPiece bytes. The rings of rows lie `kPitch` bytes apart.
template <int kPieceBytes, int kLogPieces, int kPad>
struct StreamRing {
  static constexpr int kPiece = kPieceBytes, kPieces = 1 << kLogPieces, kBytes = kPiece * kPieces,
                       kPitch = kBytes + kPad;  // rows begin in different banks
  static __device__ __forceinline__ int slot(unsigned piece) { return static_cast<int>(piece % kPieces); }
  static __device__ __forceinline__ int phase(unsigned piece) { return static_cast<int>(piece >> kLogPieces & 1); }

  // Two elements, the first of them `bits` bits after byte `at`.
  template <bool kWraps, int kUnit>
  static __device__ __forceinline__ std::uint32_t two(std::uint32_t ring, int at, int bits) {
    const auto load = [&](int from) { return shared_word(ring + (kWraps ? from & (kBytes - 1) : from)); };
    const std::uint32_t low = load(at);
    if constexpr (kUnit >= 4) return low;
    return __funnelshift_r(low, load(at + 4), bits);
  }
};

// Makes this thread arrive at a barrier as soon as all copies that the thread has begun are done.
__device__ __forceinline__ void mbarrier_arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace rlk::cuda
