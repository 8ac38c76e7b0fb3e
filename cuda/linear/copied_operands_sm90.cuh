// Spare warps of a product's own blocks copy operands that TMA cannot read, a little ahead of the products. The copies'
// rows begin at multiples of 16 bytes. Warps claim pieces of copies in the order in which tiles need them: by waves of
// tiles, and inside a wave by contraction index. Each panel (the rows of a tile) has one counter of finished pieces per
// range of the contraction, which loading warps read. Copying warps never wait for another warp. So the launch ends
// even if some of its blocks begin only after others have ended.
#pragma once

#include <algorithm>

#include "../common/fetch_increment.cuh"
#include "../common/mbarrier_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "gemm_launch.h"
#include "gemm_store_sm90.cuh"
#include "row_vectors.cuh"

namespace rlk::cuda {

// The pieces of one operand: log2 of the vectors per row of a piece, rows per piece, pieces per panel and range.
template <int kRows, bool kMnMajor>
struct Pieces {
  static constexpr int kLog2Width = kMnMajor ? (kRows == 128 ? 4 : 5) : 7;
  static constexpr int kRowsOf = kPieceVectors >> kLog2Width;
  static constexpr int kCount = kRows * kCopyRange / kPerVector / kPieceVectors;
  static_assert(kMnMajor ? kRows * 2 == 16 << kLog2Width : kCopyRange * 2 == 16 << kLog2Width);
};

// A spare warp's ring in shared memory. Each buffer receives kBatch vectors of a piece, in one to eight runs of a row.
// A run begins at the multiple of 16 bytes before its first element and has one vector more.
struct CopyRing {
  static constexpr int kWarps = 3, kBuffers = 2, kBatch = 128, kMostRuns = 8;
  static constexpr int kBufferBytes = (kBatch + kMostRuns) * 16;
  static constexpr int kMemory = kWarps * kBuffers * (kBufferBytes + 8);
  std::uint32_t buffers, barriers;
  RingPosition filled, read;

  __device__ __forceinline__ CopyRing(std::uint32_t memory, int warp)
      : buffers(memory + warp * kBuffers * kBufferBytes),
        barriers(memory + kWarps * kBuffers * kBufferBytes + warp * kBuffers * 8) {}
  __device__ __forceinline__ void init(int lane) {
    if (lane < kBuffers) mbarrier_init(barriers + lane * 8, kMostRuns);
    mbarrier_init_fence();
    __syncwarp();
  }
};

__device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t from) {
  std::uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from));
  return x;
}

// Copies piece `piece` of a panel's range to `to`. Elements after a row's end in its last vector are not set to zero,
// because TMA does not read them.
template <int kRows, bool kMnMajor>
__device__ __forceinline__ void copy_piece(const CopiedOperand& x, CopyRing* ring, int panel, int range, int piece,
                                           int lane) {
  using P = Pieces<kRows, kMnMajor>;
  constexpr int kBatch = CopyRing::kBatch, kRun = std::min(kBatch, 1 << P::kLog2Width), kRuns = kBatch / kRun;
  constexpr int kBatches = kPieceVectors / kBatch;
  static_assert(kRun == 1 << P::kLog2Width);
  const int first_row = (kMnMajor ? range * kCopyRange : panel * kRows) + piece * P::kRowsOf;
  const int first_vector = (kMnMajor ? panel * kRows : range * kCopyRange) / kPerVector;
  const int rows = min(P::kRowsOf, x.rows - first_row), vectors = min(kRun, x.vectors - first_vector);
  if (rows <= 0 || vectors <= 0) return;
  const std::uint64_t from = x.from + first_row * x.stride + first_vector * 16;
  const auto fill = [&](int batch) {
    const std::uint32_t to = ring->buffers + ring->filled.stage * CopyRing::kBufferBytes;
    const std::uint32_t barrier = ring->barriers + ring->filled.stage * 8;
    ring->filled.advance(CopyRing::kBuffers);
    if (lane >= CopyRing::kMostRuns) return;
    const int row = batch * kRuns + lane;
    if (lane >= kRuns || row >= rows) return mbarrier_arrive(barrier);
    // Loads whole vectors of the operand's memory. The operand's first and last elements may lie outside of these
    // vectors.
    const std::uint64_t run = (from + row * x.stride) / 16 * 16;
    const std::uint64_t begin = max(run, x.first_vector), end = min(run + (vectors + 1) * 16, x.last_vector);
    if (begin >= end) return mbarrier_arrive(barrier);
    const int bytes = static_cast<int>(end - begin);
    mbarrier_arrive_expect(barrier, bytes);
    load_bytes(to + lane * (kRun + 1) * 16 + static_cast<int>(begin - run), reinterpret_cast<const void*>(begin), bytes,
               barrier);
  };
#pragma unroll 1
  for (int batch = 0; batch < CopyRing::kBuffers; ++batch) fill(batch);
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch) {
    mbarrier_wait_block(ring->barriers + ring->read.stage * 8, ring->read.phase);
    const std::uint32_t buffer = ring->buffers + ring->read.stage * CopyRing::kBufferBytes;
    ring->read.advance(CopyRing::kBuffers);
#pragma unroll 1
    for (int run = 0; run < kRuns; ++run) {
      const int row = batch * kRuns + run;
      if (row >= rows) break;
      const auto shift = static_cast<unsigned>((from + row * x.stride) % 16);
      const unsigned bits = (shift & 2) * 8;
      const std::uint32_t at = buffer + run * (kRun + 1) * 16 + shift / 4 * 4 + lane * 4;
      auto* const to = reinterpret_cast<std::uint32_t*>(x.to + (first_row + row) * x.pitch + first_vector) + lane;
      constexpr int kWords = kRun / 8, kTogether = std::min(kWords, 8);  // words per lane
#pragma unroll 1
      for (int first = 0; first < kWords; first += kTogether) {
        std::uint32_t words[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const std::uint32_t word = at + (first + i) * 128;
          words[i] = __funnelshift_r(load_shared_4(word), load_shared_4(word + 4), bits);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (((first + i) * 32 + lane) / 4 < vectors) to[(first + i) * 32] = words[i];
        }
      }
    }
    __syncwarp();
    if (batch + CopyRing::kBuffers < kBatches) fill(batch + CopyRing::kBuffers);
  }
  // The elements that were not loaded lie in the operand's first vector and in its last two vectors.
  const auto elements = [&](int row, int v) {
    if (row < first_row || row >= first_row + rows || v < first_vector || v >= first_vector + vectors) return;
    const auto* const of_row = reinterpret_cast<const std::uint16_t*>(x.from + row * x.stride);
    x.to[row * x.pitch + v] = vector_of_elements(of_row, v, x.columns);
  };
  if (lane == 0) elements(0, 0);
  if (lane == 1) elements(x.rows - 1, x.vectors - 1);
  if (lane == 2) elements(x.rows - 1, x.vectors - 2);
}

// Every spare warp of every block calls this function.
template <class Tile>
__device__ __forceinline__ void copy_operands(const CopiedOperands& c, CopyRing ring, int lane) {
  ring.init(lane);
  using PiecesA = Pieces<Tile::kBM, Tile::kAMnMajor>;
  using PiecesB = Pieces<Tile::kBN, Tile::kBMnMajor>;
  unsigned claimed = lane == 0 ? fetch_increment(c.claimed) : 0;
  int wave = 0, first = 0;  // the wave of the claimed piece, and the wave's first piece
  for (;;) {
    const int piece = __shfl_sync(0xffffffff, static_cast<int>(claimed), 0);
    int first_a, panels_a, first_b, panels_b, of_a, per_range;
    for (;; ++wave) {
      // The first wave of tiles needs panels of A and of B. Further waves over the same rows of tiles need only panels
      // of B, and later waves only panels of A.
      if (wave == c.waves) return;
      const int rows = wave < c.waves_b ? wave : wave - c.waves_b + 1;
      first_a = wave < c.waves_b ? 0 : rows * c.wave_a;
      panels_a = c.a.to == nullptr || (wave > 0 && wave < c.waves_b) ? 0 : min(c.wave_a, c.panels_a - first_a);
      first_b = wave * c.wave_b;
      panels_b = c.b.to == nullptr || wave >= c.waves_b ? 0 : min(c.wave_b, c.panels_b - first_b);
      of_a = panels_a * PiecesA::kCount;
      per_range = of_a + panels_b * PiecesB::kCount;
      if (piece - first < per_range * c.ranges) break;
      first += per_range * c.ranges;
    }
    if (lane == 0) claimed = fetch_increment(c.claimed);
    const int range = (piece - first) / per_range, in_range = piece - first - range * per_range;
    int done;
    if (in_range < of_a) {
      const int panel = first_a + in_range / PiecesA::kCount;
      done = panel * c.ranges + range;
      copy_piece<Tile::kBM, Tile::kAMnMajor>(c.a, &ring, panel, range, in_range % PiecesA::kCount, lane);
    } else {
      const int panel = first_b + (in_range - of_a) / PiecesB::kCount;
      done = (c.panels_a + panel) * c.ranges + range;
      copy_piece<Tile::kBN, Tile::kBMnMajor>(c.b, &ring, panel, range, (in_range - of_a) % PiecesB::kCount, lane);
    }
    __syncwarp();
    if (elect_one()) end_turn(c.done + done);
  }
}

// Waits for `count` pieces. Only the last load of the counter acquires: an acquiring load invalidates L1, through which
// the block's other warps copy.
__device__ __forceinline__ void wait_for_pieces(const std::uint32_t* done, std::uint32_t count) {
  for (;;) {
    std::uint32_t pieces;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(pieces) : "l"(done) : "memory");
    if (pieces >= count) break;
    __nanosleep(100);
  }
  wait_for_turn(done, count);
}

// Waits until the range that begins with stage k is copied. All lanes of a warp call this function.
template <class Tile>
__device__ __forceinline__ void wait_for_copies(const CopiedOperands& c, int panel_a, int panel_b, int k) {
  constexpr int kSteps = kCopyRange / Tile::kStageK;
  if (k % kSteps != 0) return;
  const int range = k / kSteps;
  if (c.a.to != nullptr) {
    wait_for_pieces(c.done + panel_a * c.ranges + range, Pieces<Tile::kBM, Tile::kAMnMajor>::kCount);
  }
  if (c.b.to != nullptr) {
    wait_for_pieces(c.done + (c.panels_a + panel_b) * c.ranges + range, Pieces<Tile::kBN, Tile::kBMnMajor>::kCount);
  }
}

}  // namespace rlk::cuda
