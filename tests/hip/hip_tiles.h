// One matrix tile of each shape: operands through LDS, accumulators in registers, several waves per block. C
// [kSize, kSize * waves] = A [kSize, K] B^T, B [kSize * waves, K]; K is a multiple of 16.
#pragma once

#include "hip/common/wave.h"

namespace rlk::hip {

constexpr int kTileThreads = 128;
constexpr int kTileK = 16;  // columns of A and B in LDS at a time

template <class Operand, int kSize>
RLK_DEVICE void tile_kernel(const std::uint16_t* a, const std::uint16_t* b, float* c, int k) {
  constexpr int kOutputs = kSize * kSize / kWave, kStep = kSize == 32 ? 8 : 16, kWaves = kTileThreads / kWave;
  const int thread = thread_id(), wave = thread / kWave, lane = thread % kWave;
  auto* a_tile = reinterpret_cast<std::uint16_t*>(lds());
  std::uint16_t* b_tile = a_tile + kSize * kTileK;
  Accumulator<kOutputs> sum{};
  for (int first = 0; first < k; first += kTileK) {
    for (int i = thread; i < kSize * kTileK; i += kTileThreads) a_tile[i] = a[i / kTileK * k + first + i % kTileK];
    for (int i = thread; i < kWaves * kSize * kTileK; i += kTileThreads) {
      b_tile[i] = b[i / kTileK * k + first + i % kTileK];
    }
    block_barrier();
    for (int step = 0; step < kTileK; step += kStep) {
      const int at = step + lane / kSize * 4;
      Operand x, y;
      for (int i = 0; i < 4; ++i) {
        x.v[i] = a_tile[lane % kSize * kTileK + at + i];
        y.v[i] = b_tile[(wave * kSize + lane % kSize) * kTileK + at + i];
      }
      if constexpr (kSize == 32) {
        sum = mfma_32x32x8(x, y, sum);
      } else {
        sum = mfma_16x16x16(x, y, sum);
      }
    }
    block_barrier();
  }
  for (int i = 0; i < kOutputs; ++i) {
    const int row = kSize == 32 ? 8 * (i / 4) + 4 * (lane / 32) + i % 4 : 4 * (lane / 16) + i;
    c[row * kSize * kWaves + wave * kSize + lane % kSize] = sum.v[i];
  }
}

}  // namespace rlk::hip
