// Matrix product for compute capability 9.0 of at most 32 rows of x. Rows of x and of the weights may begin at any
// element. Reads of the weights limit its speed. A warpgroup copies slices of `slice_rows` weight rows, and all rows of
// x, to a ring in shared memory. Each of the other warps shifts the fragments of 16 weight rows into place in
// registers, and multiplies them with all rows of x by mma.sync. Numbers: README.md.
#pragma once

#include "../common/mma_sm80.cuh"
#include "gemm_small_m_sm90.cuh"
#include "row_streams_sm90.cuh"

namespace rlk::cuda {

struct FewRowsLaunch {
  GemmLaunch gemm;
  RowStreams weight, x;
  int slice_rows;  // weight rows of a block, a multiple of 16
  int slices;      // number of slices of all weight rows
  int pieces;      // pieces of 256 bytes in a row
  int ring;        // pieces in a row's ring
  // Number of loading warps that copy a piece together, 1 or 4. In short slices each warp copies its own pieces, so one
  // warp waits while another computes addresses. In long slices, pieces that one warp copies would arrive too late.
  int warps_of_piece;
};

constexpr int kFewRowsPiece = 256;                         // bytes
constexpr int kFewRowsEnough = 2048, kFewRowsMost = 4096;  // bytes of the pieces of a row's ring
constexpr int kFewRowsMostPieces = kFewRowsMost / kFewRowsPiece;
// Bytes of a row's ring with pieces of `bytes` bytes in all. A second copy of the ring's first line follows the last
// piece, so a reader never wraps around inside a piece. Rows begin in different banks.
constexpr int few_rows_pitch(int bytes) { return bytes + kLine + 32; }
constexpr int few_rows_fixed_bytes(int slice_rows) {
  return slice_rows / 16 * kStagingBytes + 2 * kFewRowsMostPieces * 8;
}

// Four elements from byte `at` on. `at` is a multiple of 8 if kUnit is 8, otherwise a multiple of 4. The first element
// begins `bits` bits after byte `at`.
template <int kUnit>
__device__ __forceinline__ void four_elements(std::uint32_t& low, std::uint32_t& high, std::uint32_t at, int bits) {
  if constexpr (kUnit == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(at) : "memory");
  } else {
    const std::uint32_t first = shared_word(at), second = shared_word(at + 4), third = shared_word(at + 8);
    low = __funnelshift_r(first, second, bits);
    high = __funnelshift_r(second, third, bits);
  }
}

// Avoids bank conflicts between rows that begin at multiples of 8 bytes, but not of 16. The banks of neighbouring rows
// then differ by a multiple of 8 bytes, and four rows that are four apart use different banks. The function returns
// which of the 16 rows a lane takes as fragment row g (i = 0) or g + 8 (i = 1).
__device__ __forceinline__ int spread_row(int g, int i) { return g % 4 * 4 + g / 4 + 2 * i; }
// Restores, in the sums, the order of the rows that spread_row() has permuted.
template <int kTiles>
__device__ __forceinline__ void gather_rows(float (&d)[4 * kTiles], int lane) {
  const int g = lane / 4;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = (g / 4 + 2 * i + 4 * (g & 1)) * 4 + lane % 4;  // row g + 8 i
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float low = __shfl_sync(0xffffffff, d[4 * j + c], from);
        const float high = __shfl_sync(0xffffffff, d[4 * j + 2 + c], from);
        v[2 * i + c] = (g & 2) != 0 ? high : low;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) d[4 * j + i] = v[i];
  }
}

// `kTiles`: x has at most 8 kTiles rows. `kUnit`: every row begins at a multiple of kUnit bytes, 2 or 8. In a step of
// 16 contraction indices, lane t of four has the indices 4t to 4t + 3. The lane passes these indices to mma.sync as
// indices 2t + {0, 1, 8, 9}. The order of indices inside a step changes no bit.
template <class T, int kTiles, int kUnit>
__global__ void __launch_bounds__(384, 1) gemm_few_rows_sm90_kernel(const __grid_constant__ FewRowsLaunch launch) {
  constexpr int kPiece = kFewRowsPiece, kSteps = kPiece / 32, kAhead = 4;
  constexpr bool kSpreads = kUnit == 8;
  extern __shared__ __align__(1024) unsigned char shared[];  // [weights, x][staging][barriers]
  const GemmLaunch& g = launch.gemm;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int slice_rows = launch.slice_rows, warps = slice_rows / 16, pieces = launch.pieces, ring = launch.ring;
  const int ring_bytes = ring * kPiece, pitch = few_rows_pitch(ring_bytes);
  const std::uint32_t base = shared_address(shared), of_x = base + slice_rows * pitch;
  const std::uint32_t staging = of_x + 8 * kTiles * pitch;
  const std::uint32_t full = staging + warps * kStagingBytes, empty = full + kFewRowsMostPieces * 8;
  if (threadIdx.x < ring) {
    mbarrier_init(full + threadIdx.x * 8, launch.warps_of_piece * 32);
    mbarrier_init(empty + threadIdx.x * 8, warps);
    mbarrier_init_fence();
  }
  const Slices mine = slices_of_block(launch.slices);
  if (warp >= warps) {  // prefetches as in gemm_sm90.cuh
    const int thread = static_cast<int>(threadIdx.x) - warps * 32;
    for (int piece = 0; piece < g.prefetched_steps; ++piece) {
      prefetch_rows<kPiece, kWarpgroup>(launch.weight, mine.first * slice_rows, slice_rows, piece, thread);
    }
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  if (warp >= warps) {
    const bool alone = launch.warps_of_piece == 1;
    const int thread = alone ? lane : static_cast<int>(threadIdx.x) - warps * 32;
    const auto copy = [&](const RowStreams& rows, int first, int count, int piece, std::uint32_t to, int stage) {
      const int again = stage == 0 ? ring_bytes : 0;
      to += stage * kPiece;
      if (alone) {
        begin_row_copies<kPiece, 32>(rows, first, count, piece, to, pitch, thread, again);
      } else {
        begin_row_copies<kPiece, kWarpgroup>(rows, first, count, piece, to, pitch, thread, again);
      }
    };
    const auto copies = [&](int piece) { return !alone || piece % 4 == warp - warps; };
    RingPosition at;
    int turn = 0;  // pieces so far
    for (int slice = mine.first; slice < mine.end; slice += mine.step) {
      // One more piece is copied, because a row's last elements may lie in the line after the last piece.
#pragma unroll 1
      for (int piece = 0; piece <= pieces; ++piece, ++turn, at.advance(ring)) {
        if (!copies(turn)) continue;
        mbarrier_wait_block(empty + at.stage * 8, at.phase ^ 1);
        copy(launch.weight, slice * slice_rows, slice_rows, piece, base, at.stage);
        copy(launch.x, 0, 8 * kTiles, piece, of_x, at.stage);
        mbarrier_arrive_after_copies(full + at.stage * 8);
      }
    }
    return;
  }
  const int part = lane % 4 * 8;
  // The address of a row's next elements for this lane in the ring. If a row of x does not exist, the lane reads the
  // last row instead.
  std::uint32_t at_x[kTiles], at_a[2];
  int bits_x[kTiles], bits_a[2];
  int in_ring = 0;  // the offset of the current piece that the addresses of x contain
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int row = min(8 * i + lane / 4, launch.x.rows - 1), shift = row_shift(launch.x, row);
    at_x[i] = of_x + row * pitch + (shift & ~3) + part, bits_x[i] = (shift & 2) * 8;
  }
  const auto row_of = [&](int i) { return warp * 16 + (kSpreads ? spread_row(lane / 4, i) : lane / 4 + 8 * i); };
  RingPosition filled;  // the next piece to wait for
  int freed = 0;        // the stage of the next piece to free
  const auto wait_for_piece = [&] {
    mbarrier_wait_block(full + filled.stage * 8, filled.phase);
    filled.advance(ring);
  };
  const auto release_piece = [&] {
    if (lane == 0) mbarrier_arrive(empty + freed * 8);
    if (++freed == ring) freed = 0;
  };
  for (int slice = mine.first; slice < mine.end; slice += mine.step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int shift = row_shift(launch.weight, slice * slice_rows + row_of(i));
      at_a[i] = base + row_of(i) * pitch + (shift & ~3) + part + freed * kPiece, bits_a[i] = (shift & 2) * 8;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) at_x[i] += freed * kPiece - in_ring;
    in_ring = freed * kPiece;
    float d[4 * kTiles];
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) d[i] = 0.0f;
    // Fragments of kAhead steps. A step's fragments are loaded kAhead steps before its products.
    struct Step {
      std::uint32_t a[4], b[kTiles][2];
    } steps[kAhead];
    const auto load = [&](Step& to, int step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) four_elements<kUnit>(to.a[i], to.a[2 + i], at_a[i] + step * 32, bits_a[i]);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        four_elements<kUnit>(to.b[i][0], to.b[i][1], at_x[i] + step * 32, bits_x[i]);
      }
    };
    wait_for_piece();
    wait_for_piece();
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(steps[step], step);
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
      const bool last = piece + 1 == pieces;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Step& now = steps[step % kAhead];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          mma_m16n8k16<T>(reinterpret_cast<float(&)[4]>(d[4 * i]), now.a, now.b[i][0], now.b[i][1]);
        }
        if (step + kAhead == kSteps) {
          __syncwarp();
          release_piece();
          if (!last) wait_for_piece();
          const int on = freed == 0 ? kPiece - ring_bytes : kPiece;
#pragma unroll
          for (int i = 0; i < 2; ++i) at_a[i] += on;
#pragma unroll
          for (int i = 0; i < kTiles; ++i) at_x[i] += on;
          in_ring += on;
        }
        // After the last piece, the load reads arbitrary words, which are not used.
        load(now, (step + kAhead) % kSteps);
      }
    }
    release_piece();  // the piece that holds the rows' ends
    if constexpr (kSpreads) gather_rows<kTiles>(d, lane);
    store_columns<8 * kTiles>(g, d, staging + warp * kStagingBytes, 0, slice * slice_rows + warp * 16, lane);
  }
}

}  // namespace rlk::cuda
