// Loads weights whose rows are not aligned to 16 bytes, so that TMA cannot read them. The loading warpgroup copies
// aligned vectors to its own ring by cp.async. Some stages later it shifts their elements into the ring that wgmma
// reads, in the layout that TMA would have written.
#pragma once

#include "../common/async_copy_groups_sm80.cuh"
#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/tile_ring_sm90.cuh"
#include "gemm_launch.h"
#include "row_vectors.cuh"

namespace rlk::cuda {

// A thread's vectors of a tile of kRows rows by 64 contraction indices: one vector in every 16th row. Neighbouring
// threads of one warp have the eight vectors of a row, so each warp reads only what its own threads copied.
template <int kRows>
class RowLoads {
 public:
  static constexpr int kOfRow = kBoxK / kPerVector, kRowStep = kWarpgroup / kOfRow, kVectors = kRows / kRowStep;
  static constexpr int kBytes = kRows * 128;  // a stage
  static_assert(kVectors * kRowStep == kRows && kRowStep % 8 == 0);

  // `first`: the tile's first row; the weights have `left` rows from there on. `raw`: kStages stages of shared memory.
  __device__ __forceinline__ RowLoads(const GemmLaunch& g, int first, int left, std::uint32_t raw)
      : row_bytes_(g.contraction * 2), vector_(static_cast<int>(threadIdx.x) % kOfRow), raw_(raw) {
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / kOfRow;
    row_ = row * 128;
    begin_ = reinterpret_cast<std::uint64_t>(g.rows_of_a) + (first + row) * g.rows_of_a_stride * 2;
    step_ = kRowStep * g.rows_of_a_stride * 2;
    left_ = left - row;
  }

  // Begins the copies of stage k to `slot`, as one group of cp.async. The vector of an address is the aligned vector
  // that contains it.
  __device__ __forceinline__ void begin_copies(int k, int slot) const {
    const int at = (k * kOfRow + vector_) * 16;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int bytes = i * kRowStep < left_ ? min(max(row_bytes_ + shift(i) - at, 0), 16) : 0;
      const std::uint64_t from = bytes > 0 ? begin_ + i * step_ - shift(i) + at : begin_ & ~std::uint64_t{15};
      copy_async_16_or_less(raw_ + slot * kBytes + row_ + i * kRowStep * 128 + vector_ * 16,
                            reinterpret_cast<const void*>(from), bytes);
    }
    copy_async_commit();
  }
  // Writes stage k, which is in `slot`, to a tile of the ring; the next stage is in `next`. wgmma then sees it.
  __device__ __forceinline__ void shift_to(std::uint32_t tile, int slot, int next) const {
    const std::uint32_t to = tile + row_ + ((vector_ ^ (row_ / 128 % 8)) << 4);  // TMA's swizzle of 128 bytes
    const std::uint32_t low = raw_ + slot * kBytes + row_ + vector_ * 16;
    const std::uint32_t high = vector_ + 1 < kOfRow ? low + 16 : raw_ + next * kBytes + row_;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      constexpr int kStep = kRowStep * 128;
      const uint4 x = shifted(load_vector(low + i * kStep), load_vector(high + i * kStep), shift(i));
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * kStep), "r"(x.x), "r"(x.y), "r"(x.z),
                   "r"(x.w)
                   : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

 private:
  // Bytes between the aligned address and the row.
  __device__ __forceinline__ int shift(int i) const { return static_cast<int>(begin_ + i * step_) & 15; }
  static __device__ __forceinline__ uint4 load_vector(std::uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
  }

  int row_bytes_, vector_, left_;
  std::uint32_t raw_, row_;
  std::uint64_t begin_;  // address of this thread's first row
  std::int64_t step_;    // bytes from one of its rows to the next
};

// Fills the stages of a tile: A by RowLoads, by all threads of the warpgroup, and B by TMA, by its first warp. The copies
// have Tile::kRawStages stages at `raw`. follows_copy: the previous kernel has waited for the kernel that wrote A, and
// writes B alone.
template <class Tile, class PortionB>
__device__ __forceinline__ void load_rows(TileRing<Tile>* ring, const RowLoads<Tile::kBM>& a, const PortionB& b,
                                          int first_b, int steps, bool follows_copy) {
  constexpr int kRaw = Tile::kRawStages;
  if (!follows_copy) wait_for_previous_kernel();
    // The shift of a stage needs a vector of the next stage, so one stage more than `steps` is copied.
#pragma unroll 1
  for (int k = 0; k < kRaw - 1; ++k) a.begin_copies(k, k);
  if (follows_copy) wait_for_previous_kernel();
  int slot = 0;
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    const int before = slot == 0 ? kRaw - 1 : slot - 1, next = slot + 1 == kRaw ? 0 : slot + 1;
    __syncwarp();  // all threads have shifted the previous stage
    a.begin_copies(k + kRaw - 1, before);
    const std::uint32_t to = ring->base + ring->at.stage * Tile::kStageBytes, barrier = ring->full + ring->at.stage * 8;
    mbarrier_wait_block(ring->empty + ring->at.stage * 8, ring->at.phase ^ 1);
    if (threadIdx.x / 32 == Tile::kWarpgroups * 4 && elect_one()) {
      mbarrier_arrive_expect(barrier, b.bytes);
      b.load(to + Tile::kBytesA, first_b, k * kBoxK, barrier);
    }
    copy_async_wait<kRaw - 2>();
    __syncwarp();
    a.shift_to(to, slot, next);
    __syncwarp();
    if (elect_one()) mbarrier_arrive(barrier);
    ring->at.advance(ring->stages);
    slot = next;
  }
  copy_async_wait<0>();
  __syncwarp();
}

}  // namespace rlk::cuda
