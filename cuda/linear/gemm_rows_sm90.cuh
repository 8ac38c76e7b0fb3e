// Tiles of the wgmma kernel for weights that TMA cannot read, because their rows may begin at any element. A warpgroup
// copies the rows to a separate ring in shared memory. The multiplying warps load A's fragments from this ring, shift
// them into place, and multiply from registers.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/tile_ring_sm90.cuh"
#include "gemm_launch.h"
#include "row_streams_sm90.cuh"

namespace rlk::cuda {

constexpr unsigned kCopyingWarps = 3;

// The ring for a tile of kRows rows. A piece has 64 contraction indices, the same number as a stage of B.
template <int kRows>
struct RowRing : StreamRing<kLine, 3, 16> {
  using Base = StreamRing<kLine, 3, 16>;
  static constexpr int kMemory = kRows * Base::kPitch + 2 * Base::kPieces * 8;  // bytes, with the barriers
  std::uint32_t base, full, empty;
  unsigned turn = 0;  // pieces so far

  __device__ __forceinline__ explicit RowRing(std::uint32_t memory)
      : base(memory), full(memory + kRows * Base::kPitch), empty(full + Base::kPieces * 8) {}
  __device__ __forceinline__ void init(int thread, int warpgroups) const {
    if (thread >= Base::kPieces) return;
    mbarrier_init(full + thread * 8, 32);
    mbarrier_init(empty + thread * 8, warpgroups * 4);
  }

  // Warp `warp` of kCopyingWarps copies every kCopyingWarps-th piece of a tile's rows, which begin with row `first`. So
  // one warp waits while another computes addresses. The end of a row may lie in the line after the last piece, so that
  // line is copied, too.
  __device__ __forceinline__ void copy(const RowStreams& from, int first, int steps, int warp, int lane) {
#pragma unroll 1
    for (int piece = 0; piece <= steps; ++piece, ++turn) {
      if (turn % kCopyingWarps != static_cast<unsigned>(warp)) continue;
      const int slot = Base::slot(turn);
      mbarrier_wait_block(empty + slot * 8, Base::phase(turn) ^ 1);
      begin_row_copies<Base::kPiece, 32>(from, first, kRows, piece, base + slot * Base::kPiece, Base::kPitch, lane);
      mbarrier_arrive_after_copies(full + slot * 8);
    }
  }
  __device__ __forceinline__ void wait(unsigned piece) const {
    mbarrier_wait_block(full + Base::slot(piece) * 8, Base::phase(piece));
  }
};

// A lane's part of its warp's fragments of A: rows lane / 4 and lane / 4 + 8 of the warp's 16 rows.
template <class Ring, int kUnit>
struct RowFragments {
  std::uint32_t ring;
  int at[2], bits[2];

  __device__ __forceinline__ RowFragments(const Ring& rows, const RowStreams& from, int first, int in_tile, int lane)
      : ring(rows.base + (in_tile + lane / 4) * Ring::kPitch) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int shift = row_shift(from, first + in_tile + lane / 4 + 8 * i);
      at[i] = (shift & ~3) + lane % 4 * 4, bits[i] = (shift & 2) * 8;
    }
  }
  template <bool kWraps>
  __device__ __forceinline__ void load(std::uint32_t (&a)[4][4], int slot) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[step][i] = Ring::template two<kWraps, kUnit>(
            ring + i % 2 * 8 * Ring::kPitch, at[i % 2] + slot * Ring::kPiece + step * 32 + i / 2 * 16, bits[i % 2]);
      }
    }
  }
  // Loads the fragments of the current piece, whose last words may lie in the next piece, and frees the current piece.
  __device__ __forceinline__ void next(std::uint32_t (&a)[4][4], Ring* rows, int lane) const {
    const int slot = Ring::slot(rows->turn);
    rows->wait(rows->turn + 1);
    if (slot + 1 == Ring::kPieces) {
      load<true>(a, slot);
    } else {
      load<false>(a, slot);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(rows->empty + slot * 8);
    ++rows->turn;
  }
  // Frees the last piece of a tile, which holds only the ends of rows.
  __device__ __forceinline__ void end(Ring* rows, int lane) const {
    if (lane == 0) mbarrier_arrive(rows->empty + Ring::slot(rows->turn) * 8);
    ++rows->turn;
  }
};

// Sums `steps` stages (an even number) for 64 rows of A, starting from +0. The fragments of a stage are loaded while
// the products of the previous stage run.
template <class T, class Tile, class Fragments, class Ring, class Release>
__device__ __forceinline__ void multiply_rows(TileRing<Tile>* b, const Fragments& fragments, Ring* rows,
                                              float (&d)[Tile::kBN / 2], int steps, int lane, const Release& release) {
  std::uint32_t a[2][4][4];
  int previous = 0;
#pragma unroll
  for (int i = 0; i < Tile::kBN / 2; ++i) d[i] = 0.0f;
  rows->wait(rows->turn);
  fragments.next(a[0], rows, lane);
#pragma unroll 1
  for (int k = 0; k < steps; k += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mbarrier_wait_block(b->full + b->at.stage * 8, b->at.phase);
      const std::uint64_t desc_b = tile_descriptor<false>(b->base + b->at.stage * Tile::kStageBytes, 64 * 128);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma_registers<T, Tile::kBN, false>(d, a[half][step], desc_b + step * kDescriptorStep<false>, 1);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the previous stage has been read
      if (k + half > 0) release(previous);
      previous = b->at.stage;
      b->at.advance(b->stages);
      if (half == 0 || k + 2 < steps) fragments.next(a[1 - half], rows, lane);
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Tile::kBN / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  release(previous);
  fragments.end(rows, lane);
}

}  // namespace rlk::cuda
