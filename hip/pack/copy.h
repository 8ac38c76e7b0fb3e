// pack and unpack. HBM bandwidth bounds the kernels, which read each byte once and write it once. The file
// kernels/packing/pack_copy.h splits the copy among threads and performs it. The file kernels/packing/pack_scan.h has
// the prefix sum. CUDA shares both files.
#pragma once

#include "hip/common/wave.h"
#include "hip/pack/launches.h"

namespace rlk::hip {

// Each block counts the tokens in one row of the mask, one token per thread at a time, and stores the row's length in
// cu_seqlens.
RLK_DEVICE void pack_positions_kernel(const PackLayoutParams& p, std::int64_t first_block) {
  constexpr int kWaves = kPositionThreads / kWave;
  // [2][kWaves]: two buffers in turn, so that a tile need not wait until the previous tile's counts are read.
  auto* of_waves = reinterpret_cast<std::int32_t*>(lds());
  const std::int64_t row = first_block + block_id_x();
  const int wave = thread_id() / kWave, lane = thread_id() % kWave;
  std::int32_t* positions = global_pointer(p.positions) + row * p.num_tokens;
  std::int32_t before = 0;
  int which = 0;
  for (std::int64_t tile = 0; tile < p.num_tokens; tile += kPositionThreads, which ^= 1) {
    const std::int64_t t = tile + thread_id();
    const bool is_kept = t < p.num_tokens && counts<GlobalMemory>(p.mask, row * p.mask.row_stride + t);
    const std::uint64_t kept = ballot(is_kept);
    if (lane == 0) of_waves[which * kWaves + wave] = __builtin_popcountll(kept);
    block_barrier();
    std::int32_t mine = before + __builtin_popcountll(kept & ((std::uint64_t{1} << lane) - 1));
#pragma unroll
    for (int w = 0; w < kWaves; ++w) {
      const std::int32_t of_wave = of_waves[which * kWaves + w];
      mine += w < wave ? of_wave : 0;
      before += of_wave;
    }
    if (t < p.num_tokens) positions[t] = is_kept ? mine : -1;
  }
  if (thread_id() == 0) global_pointer(p.cu_seqlens)[row + 1] = before;
}

RLK_DEVICE void pack_scan_kernel(const PackLayoutParams& p) {
  pack_scan_block<GlobalMemory>(p, thread_id(), *reinterpret_cast<PackScanShared*>(lds()), [] { block_barrier(); });
}

}  // namespace rlk::hip
