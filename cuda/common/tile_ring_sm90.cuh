// The main loop of matrix products on sm_90. One or two warps load tiles of the operands by TMA into a ring of stages
// in shared memory. Warpgroups multiply the tiles by wgmma.
#pragma once

#include "mbarrier_sm90.cuh"
#include "tma_sm90.cuh"
#include "wgmma_sm90.cuh"

namespace rlk::cuda {

constexpr int kBoxK = 64;  // k per box: 128 bytes, the widest swizzle
constexpr int kWarpgroup = 128;
constexpr int kMaxStages = 24;
constexpr int kLead = 3;  // the first warpgroup runs this many stages ahead (TileRing)
// Numbers of named barriers. Warpgroup i uses number 1 + i in store_boxes(). Two warpgroups that take turns use numbers
// 3 and 4.
constexpr int kTurnBarrier = 3;

// A tile of a kernel in which one warpgroup multiplies. The contraction index is contiguous in both operands, and a
// stage is one box of each operand. kOwnBytes: shared memory of the kernel without the stages and their barriers.
template <int kM, int kN, int kOwnBytes = 0>
struct OneWarpgroupTile {
  static constexpr int kBM = kM, kBN = kN;
  static constexpr bool kAMnMajor = false, kBMnMajor = false, kTakesTurns = false;
  static constexpr int kBoxes = 1, kStageK = kBoxK, kWarpgroups = 1;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kBytesA = kBM * kBoxK * 2, kBytesB = kBN * kBoxK * 2, kBoxBytes = kBytesA + kBytesB;
  static constexpr int kStageBytes = kBoxBytes;
  static constexpr int kFixedBytes = 1024 + kOwnBytes + 2 * kMaxStages * 8;
};

// A ring of stages in shared memory. Members of Tile: kBM and kBN are the numbers of rows of A and of B. kAMnMajor and
// kBMnMajor say whether the row index, not the contraction index, is contiguous. kTakesTurns says whether two
// warpgroups take turns at the start and at the end of a product.
//
// Turns: one warpgroup processes its sums while the other warpgroup multiplies. The first warpgroup multiplies the
// first kLead stages of a product alone, while the second warpgroup processes the sums of its previous product. Near
// the end of the product the second warpgroup waits. It multiplies the last kLead stages alone, while the first
// warpgroup processes its sums. Between these phases both warpgroups multiply the same stages, so that the ring
// prefetches as far ahead as it can.
template <class Tile>
struct TileRing {
  std::uint32_t base, full, empty;  // addresses of the stages [A, B], and of their barriers
  int stages;
  RingPosition at;

  // Loads stage k of both operands. All lanes of a warp call this function. All lanes compute the same operands of the
  // copies, which therefore stay in the uniform registers that the TMA unit reads. If only one lane called the
  // function, the operands would have to be moved to uniform registers (README of linear).
  template <class PortionA, class PortionB>
  __device__ __forceinline__ void load(const PortionA& a, const PortionB& b, int first_a, int first_b, int k) {
    load_boxes(a.bytes + b.bytes, k, [&](std::uint32_t to, int first_k, std::uint32_t barrier) {
      a.load(to, first_a, first_k, barrier);
      b.load(to + Tile::kBytesA, first_b, first_k, barrier);
    });
  }
  // Loads stage k of one operand; a second warp loads the other operand. Both warps arrive at the stage's barrier.
  template <bool kIsA, class Loaded>
  __device__ __forceinline__ void load_one(const Loaded& portion, int first, int k) {
    load_boxes(portion.bytes, k, [&](std::uint32_t to, int first_k, std::uint32_t barrier) {
      portion.load(to + (kIsA ? 0 : Tile::kBytesA), first, first_k, barrier);
    });
  }
  // Fills stage k. For each box of the stage, load_box(to, first_k, barrier) must start a load of `bytes` bytes.
  template <class LoadBox>
  __device__ __forceinline__ void load_boxes(int bytes, int k, const LoadBox& load_box) {
    const std::uint32_t to = base + at.stage * Tile::kStageBytes, barrier = full + at.stage * 8;
    mbarrier_wait_block(empty + at.stage * 8, at.phase ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect(barrier, Tile::kBoxes * bytes);
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        load_box(to + box * Tile::kBoxBytes, (k * Tile::kBoxes + box) * kBoxK, barrier);
      }
    }
    at.advance(stages);
  }

  // Adds the products of `steps` stages for 64 rows of A, from +0 or, with kContinues, from the given sums.
  // release(stage) must tell the loader that a stage was read. after(k) runs after step k. If sums begin at +0, the
  // first wgmma does not read its accumulators. ptxas does not know this, and reserves the accumulators' registers from
  // one call to the next. With kClears the function first clears the accumulators, so that the caller can use the
  // registers between calls.
  template <class T, bool kContinues = false, bool kClears = false, class Release, class After>
  __device__ __forceinline__ void multiply(float (&sum)[Tile::kBN / 2], int steps, int warpgroup,
                                           const Release& release, const After& after) {
    constexpr bool kAMnMajor = Tile::kAMnMajor, kBMnMajor = Tile::kBMnMajor;
    float d[Tile::kBN / 2];  // a copy of `sum`, since no code may access wgmma's accumulators while it runs
    if constexpr (kClears) {
#pragma unroll
      for (int i = 0; i < Tile::kBN / 2; ++i) d[i] = 0.0f;
    }
    int previous = 0, first = 0;
    // Turns: a warpgroup waits before stage `pause`. The wait ends when the other warpgroup has issued the products of
    // its stage `tells`, after which it arrives at the barrier.
    const bool leads = warpgroup == 0;
    const int lead = Tile::kTakesTurns ? min(min(kLead, stages - 1), (steps - 1) / 2) : 0;
    const int pause = lead == 0 ? steps : leads ? lead : steps - lead;
    const int tells = lead == 0 ? -1 : leads ? steps - 1 : lead - 1;
    const auto step_of = [&](int k) {
      mbarrier_wait_block(full + at.stage * 8, at.phase);
      const std::uint32_t tile_a = base + at.stage * Tile::kStageBytes, tile_b = tile_a + Tile::kBytesA;
      const std::uint64_t desc_a = tile_descriptor<kAMnMajor>(tile_a + warpgroup * 64 * 128, 64 * 128);
      const std::uint64_t desc_b = tile_descriptor<kBMnMajor>(tile_b, 64 * 128);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < Tile::kStageK / 16; ++step) {
        const int box = step / (kBoxK / 16) * (Tile::kBoxBytes >> 4), in_box = step % (kBoxK / 16);
        wgmma<T, Tile::kBN, kAMnMajor, kBMnMajor>(d, desc_a + (box + in_box * kDescriptorStep<kAMnMajor>),
                                                  desc_b + (box + in_box * kDescriptorStep<kBMnMajor>),
                                                  kContinues || k > 0 || step > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the previous stage has been read
      if (k > first) release(previous);
      previous = at.stage;
      at.advance(stages);
      if constexpr (Tile::kTakesTurns) {
        if (k == tells) asm volatile("bar.arrive %0, 256;" ::"r"(kTurnBarrier + leads) : "memory");
      }
      after(k);
    };
    int k = 0;
    if constexpr (kContinues) {
      // The first step is outside the loop. Inside the loop wgmmas are in flight. There ptxas would treat the given
      // sums as a second definition of the accumulators, and serialise all wgmmas (warning C7515).
#pragma unroll
      for (int i = 0; i < Tile::kBN / 2; ++i) {
        d[i] = sum[i];
        asm volatile("" : "+f"(d[i])::"memory");
      }
      step_of(k++);
    }
    if constexpr (Tile::kTakesTurns) {
#pragma unroll 1
      for (int end = pause;; end = steps) {
#pragma unroll 1
        for (; k < end; ++k) step_of(k);
        wgmma_wait<0>();
        if (end == steps) break;
        release(previous);
        first = end;
        asm volatile("bar.sync %0, 256;" ::"r"(kTurnBarrier + !leads) : "memory");
      }
    } else {
#pragma unroll 1
      for (; k < steps; ++k) step_of(k);
      wgmma_wait<0>();
    }
#pragma unroll
    for (int i = 0; i < Tile::kBN / 2; ++i) {
      asm volatile("" : "+f"(d[i])::"memory");
      sum[i] = d[i];
    }
    release(previous);
  }
};

// The portion of an operand's tile that a block of threads loads by TMA, and the number of bytes that arrive in its
// shared memory. Rows past the end of the matrix are not loaded: TMA is slow to fill in zeros, and the products of
// these rows are not stored. K-major: the tile is one chunk of kRows rows by 64 k. MN-major: the tile has chunks of 64
// columns by 64 k. If `sharing` blocks of a cluster share the tile, each block loads a slice of every chunk into the
// shared memory of all of them. kPasses: L2 evicts the loaded lines first.
template <int kRows, bool kMnMajor, bool kPasses = false>
struct Portion {
  const CUtensorMap* map;
  int chunks, slice, bytes;
  std::uint16_t ranks;

  __device__ __forceinline__ Portion(const CUtensorMap* whole, const CUtensorMap* last, int last_rows, int left,
                                     int sharing, int rank)
      : map(whole), ranks(sharing > 1 ? (1 << sharing) - 1 : 0) {
    const int slice_rows = (kMnMajor ? kBoxK : kRows) / sharing;
    slice = slice_rows * rank;
    if (kMnMajor) {
      chunks = min(kRows / 64, max(0, left + 63) / 64);
      bytes = chunks * 64 * 128;
    } else if (sharing > 1) {
      const int slices = min(sharing, max(0, left + slice_rows - 1) / slice_rows);
      chunks = rank < slices;
      bytes = slices * slice_rows * 128;
    } else {
      if (left < kRows) map = last;
      chunks = left > 0;
      bytes = chunks * (left < kRows ? last_rows : kRows) * 128;
    }
  }

  __device__ __forceinline__ void load(std::uint32_t shared, int first, int k, std::uint32_t barrier) const {
#pragma unroll
    for (int chunk = 0; chunk < (kMnMajor ? kRows / 64 : 1); ++chunk) {
      if (chunk >= chunks) break;
      const std::uint32_t to = shared + chunk * 64 * 128 + slice * 128;
      const int x = kMnMajor ? first + chunk * 64 : k, y = kMnMajor ? k + slice : first + slice;
      if constexpr (kPasses) {
        load_passing_box(to, map, x, y, barrier);
      } else if (ranks == 0) {
        load_box(to, map, x, y, barrier);
      } else {
        load_box_multicast(to, map, x, y, barrier, ranks);
      }
    }
  }

  __device__ __forceinline__ void prefetch(int first, int k) const {
    static_assert(!kMnMajor);
    if (chunks > 0) prefetch_box(map, k, first + slice);
  }
};

}  // namespace rlk::cuda
