// pack and unpack, bound by HBM: bytes are read once and written once. How threads share them out, and the copy, stand in
// rlk/kernels/pack_copy.h, shared with CUDA; the prefix sum in rlk/kernels/pack_scan.h.
#pragma once

#include "hip/common/wave.h"
#include "hip/pack/launches.h"

namespace rlk::hip {

// A block has a row of the mask, a token a thread at a time, and leaves the row's length in cu_seqlens.
RLK_DEVICE void pack_positions_kernel(const PackLayoutParams& p, std::int64_t first_block) {
  constexpr int kWaves = kPositionThreads / kWave;
  auto* of_waves = reinterpret_cast<std::int32_t*>(lds());  // [2][kWaves]: a tile need not wait for the one before
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
  auto* sums = reinterpret_cast<std::int64_t*>(lds());  // [2][kPackScanThreads]
  auto* status = reinterpret_cast<std::uint32_t*>(sums + 2 * kPackScanThreads);
  const int thread = thread_id();
  if (thread == 0) *status = 0;
  const PackRun run = pack_run<GlobalMemory>(p, thread);
  sums[thread] = run.sum;
  block_barrier();
  if (run.status != 0) atomic_or(status, static_cast<std::uint32_t>(run.status));
  int from = 0;
  for (int distance = 1; distance < kPackScanThreads; distance *= 2, from ^= kPackScanThreads) {
    const std::int64_t more = thread >= distance ? sums[from + thread - distance] : 0;
    sums[(from ^ kPackScanThreads) + thread] = sums[from + thread] + more;
    block_barrier();
  }
  pack_write_run<GlobalMemory>(p, run, sums[from + thread] - run.sum);
  if (thread != 0) return;
  global_pointer(p.cu_seqlens)[0] = 0;
  const bool overflows = sums[from + kPackScanThreads - 1] > p.capacity;
  *global_pointer(p.status) = static_cast<std::int32_t>(*status) | (overflows ? kPackOverflow : 0);
}

}  // namespace rlk::hip
