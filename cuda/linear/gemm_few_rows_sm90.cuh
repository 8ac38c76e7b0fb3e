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
  // Number of loading warps that copy a piece together, 1 or 4. In short slices each warp copies its own pieces, so one
  // warp waits while another computes addresses. In long slices, pieces that one warp copies would arrive too late.
  int warps_of_piece;
};

constexpr int kFewRowsPiece = 256;  // bytes
template <int kLogPieces>
using FewRowsRing = StreamRing<kFewRowsPiece, kLogPieces, 32>;
constexpr int few_rows_fixed_bytes(int slice_rows) { return slice_rows / 16 * kStagingBytes + 256; }

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
template <class T, int kTiles, int kUnit, int kLogPieces>
__global__ void __launch_bounds__(384, 1) gemm_few_rows_sm90_kernel(const __grid_constant__ FewRowsLaunch launch) {
  using Ring = FewRowsRing<kLogPieces>;
  constexpr int kSteps = kFewRowsPiece / 32, kAhead = 4;
  constexpr bool kSpreads = kUnit == 8;
  extern __shared__ __align__(1024) unsigned char shared[];  // [weights, x][staging][barriers]
  const GemmLaunch& g = launch.gemm;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int slice_rows = launch.slice_rows, warps = slice_rows / 16, pieces = launch.pieces;
  const std::uint32_t base = shared_address(shared), of_x = base + slice_rows * Ring::kPitch;
  const std::uint32_t staging = of_x + 8 * kTiles * Ring::kPitch;
  const std::uint32_t full = staging + warps * kStagingBytes, empty = full + Ring::kPieces * 8;
  if (threadIdx.x < Ring::kPieces) {
    mbarrier_init(full + threadIdx.x * 8, launch.warps_of_piece * 32);
    mbarrier_init(empty + threadIdx.x * 8, warps);
    mbarrier_init_fence();
  }
  const Slices mine = slices_of_block(launch.slices);
  if (warp >= warps) {  // prefetches as in gemm_sm90.cuh
    const int thread = static_cast<int>(threadIdx.x) - warps * 32;
    for (int piece = 0; piece < g.prefetched_steps; ++piece) {
      Ring::template prefetch<kWarpgroup>(launch.weight, mine.first * slice_rows, slice_rows, piece, thread);
    }
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  unsigned turn = 0;  // pieces so far
  if (warp >= warps) {
    const auto copy = [&]<int kThreads>(int slice, int piece, int slot, int thread) {
      Ring::template begin_copies<kThreads>(launch.weight, slice * slice_rows, slice_rows, piece,
                                            base + slot * Ring::kPiece, thread);
      Ring::template begin_copies<kThreads>(launch.x, 0, 8 * kTiles, piece, of_x + slot * Ring::kPiece, thread);
    };
    const bool alone = launch.warps_of_piece == 1;
    for (int slice = mine.first; slice < mine.end; slice += mine.step) {
      // One more piece is copied, because a row's last elements may lie in the line after the last piece.
#pragma unroll 1
      for (int piece = 0; piece <= pieces; ++piece, ++turn) {
        if (alone && turn % 4 != static_cast<unsigned>(warp - warps)) continue;
        const int slot = Ring::slot(turn);
        mbarrier_wait_block(empty + slot * 8, Ring::phase(turn) ^ 1);
        if (alone) {
          copy.template operator()<32>(slice, piece, slot, lane);
        } else {
          copy.template operator()<kWarpgroup>(slice, piece, slot, static_cast<int>(threadIdx.x) - warps * 32);
        }
        mbarrier_arrive_after_copies(full + slot * 8);
      }
    }
    return;
  }
  const int part = lane % 4 * 8;
  // A row's ring, and the row's first element for this lane. If a row of x does not exist, the lane reads the last row
  // instead.
  struct Row {
    std::uint32_t ring;
    int at, bits;
    __device__ __forceinline__ void set(std::uint32_t rings, int in_ring, int shift, int of_lane) {
      ring = rings + in_ring * Ring::kPitch;
      at = (shift & ~3) + of_lane, bits = (shift & 2) * 8;
    }
  } row_x[kTiles], row_a[2];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int row = min(8 * i + lane / 4, launch.x.rows - 1);
    row_x[i].set(of_x, row, row_shift(launch.x, row), part);
  }
  const auto row_of = [&](int i) { return warp * 16 + (kSpreads ? spread_row(lane / 4, i) : lane / 4 + 8 * i); };
  for (int slice = mine.first; slice < mine.end; slice += mine.step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_a[i].set(base, row_of(i), row_shift(launch.weight, slice * slice_rows + row_of(i)), part);
    }
    float d[4 * kTiles];
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) d[i] = 0.0f;
    // Fragments of kAhead steps. A step's fragments are loaded kAhead steps before its products.
    struct Step {
      std::uint32_t a[4], b[kTiles][2];
    } steps[kAhead];
    const auto load = [&](Step& to, unsigned piece, int step) {
      const int first = Ring::slot(piece) * Ring::kPiece + step * 32;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Ring::template four<kUnit>(to.a[i], to.a[2 + i], row_a[i].ring, row_a[i].at + first, row_a[i].bits);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        Ring::template four<kUnit>(to.b[i][0], to.b[i][1], row_x[i].ring, row_x[i].at + first, row_x[i].bits);
      }
    };
    const auto wait_for = [&](unsigned piece) {
      mbarrier_wait_block(full + Ring::slot(piece) * 8, Ring::phase(piece));
    };
    const auto release = [&](unsigned piece) {
      if (lane == 0) mbarrier_arrive(empty + Ring::slot(piece) * 8);
    };
    wait_for(turn);
    wait_for(turn + 1);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) load(steps[step], turn, step);
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece, ++turn) {
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
          release(turn);
          if (!last) wait_for(turn + 2);
        }
        // After the last piece, the load reads arbitrary words, which are not used.
        load(now, turn + (step + kAhead) / kSteps, (step + kAhead) % kSteps);
      }
    }
    release(turn++);  // the piece that holds the rows' ends
    if constexpr (kSpreads) gather_rows<kTiles>(d, lane);
    store_columns<8 * kTiles>(g, d, staging + warp * kStagingBytes, 0, slice * slice_rows + warp * 16, lane);
  }
}

}  // namespace rlk::cuda
