// The main loop of two warpgroups that alternate. Each warpgroup has its own tile of the result. While one warpgroup
// multiplies, the other warpgroup processes the finished sums of its tile. The processing costs no time if it is
// shorter than the products of a tile. Both warpgroups use one ring of stages.
#pragma once

#include "tile_ring_sm90.cuh"

namespace rlk::cuda {

// A tile of 128 rows by kN columns. A warpgroup computes all 128 rows, with one accumulator for each half of 64 rows.
// The registers suffice for up to 192 columns.
template <int kN>
struct PingPongTile {
  static constexpr int kBM = 128, kBN = kN, kHalves = 2, kFragment = kN / 2;
  static constexpr bool kAMnMajor = false, kBMnMajor = false, kTakesTurns = false;
  static constexpr int kBoxes = 1, kStageK = kBoxK;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kLoaderRegisters = 40, kRegisters = (504 - kLoaderRegisters) / kWarpgroups / 8 * 8;
  static constexpr int kBytesA = kBM * kBoxK * 2, kBytesB = kBN * kBoxK * 2, kBoxBytes = kBytesA + kBytesB;
  static constexpr int kStageBytes = kBoxBytes;
  static constexpr int kArrivals = 4;  // a stage is free when the four warps of the warpgroup that reads it have
                                       // arrived
};

// Adds the products of `steps` stages of a tile, from +0. release(stage) must tell the loader that a stage was read.
// issued() must tell the other warpgroup that the last stage's products were issued. The other warpgroup must wait for
// this signal before it waits for its first stage. The reason is that the parity of a barrier distinguishes only
// neighbouring phases.
template <class T, class Tile, class Release, class Issued>
__device__ __forceinline__ void multiply_in_turn(TileRing<Tile>* ring, float (&sum)[Tile::kHalves][Tile::kFragment],
                                                 int steps, const Release& release, const Issued& issued) {
  float low[Tile::kFragment], high[Tile::kFragment];  // copies of `sum`, since no code may access wgmma's sums while it
                                                      // runs
#pragma unroll
  // Clearing the sums lets ptxas use their registers for other values between two tiles.
  for (int i = 0; i < Tile::kFragment; ++i) low[i] = high[i] = 0.0f;
  int previous = 0;
#pragma unroll 1
  for (int k = 0; k < steps; ++k) {
    mbarrier_wait_block(ring->full + ring->at.stage * 8, ring->at.phase);
    const std::uint32_t tile_a = ring->base + ring->at.stage * Tile::kStageBytes, tile_b = tile_a + Tile::kBytesA;
    const std::uint64_t desc_a = tile_descriptor<false>(tile_a, 64 * 128),
                        desc_b = tile_descriptor<false>(tile_b, 64 * 128);
    constexpr int kHalf = 64 * 128 >> 4;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBoxK / 16; ++step) {
      constexpr std::uint64_t kStep = kDescriptorStep<false>;
      const int keeps = k > 0 || step > 0;
      wgmma<T, Tile::kBN, false, false>(low, desc_a + step * kStep, desc_b + step * kStep, keeps);
      wgmma<T, Tile::kBN, false, false>(high, desc_a + kHalf + step * kStep, desc_b + step * kStep, keeps);
    }
    wgmma_commit();
    if (k == steps - 1) issued();
    wgmma_wait<1>();  // the previous stage has been read
    if (k > 0) release(previous);
    previous = ring->at.stage;
    ring->at.advance(ring->stages);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < Tile::kFragment; ++i) {
    asm volatile("" : "+f"(low[i])::"memory");
    asm volatile("" : "+f"(high[i])::"memory");
    sum[0][i] = low[i], sum[1][i] = high[i];
  }
  release(previous);
}

// Advances the ring's position past the stages of the other warpgroup's tile.
template <class Tile>
__device__ __forceinline__ void skip_stages(TileRing<Tile>* ring, int steps) {
  const int stage = ring->at.stage + steps % ring->stages;
  const bool wraps = stage >= ring->stages;
  ring->at.stage = wraps ? stage - ring->stages : stage;
  ring->at.phase ^= (steps / ring->stages + wraps) & 1;
}

}  // namespace rlk::cuda
