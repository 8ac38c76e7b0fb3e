// The prefix sum of pack_layout, computed by one block of a GPU, for CUDA and HIP. The scan processes one tile of
// lengths at a time, and loads the next tile ahead. Neighbouring threads read and write neighbouring memory, although
// each thread adds consecutive lengths: shared memory transposes them.
#pragma once

#include <cstdint>

#include "rlk/ops/pack.h"

namespace rlk {

constexpr int kPackScanThreads = 512;
constexpr int kPackScanLengths = 16;  // lengths per thread and tile
constexpr int kPackScanTile = kPackScanThreads * kPackScanLengths;

struct PackScanShared {
  struct alignas(16) {
    std::int32_t of[kPackScanLengths + 4];  // the padding of 4 avoids bank conflicts of neighbouring threads
  } lengths[kPackScanThreads];              // lengths at first, later the offsets after the lengths
  std::uint32_t sums[2][kPackScanThreads];
  std::int32_t status;
};

namespace pack_detail {

constexpr std::uint32_t kMostPackSum = std::uint32_t{1} << 31;  // more than any capacity; larger sums are clamped to it
RLK_HD std::uint32_t pack_sum(std::uint32_t a, std::uint32_t b) { return a > kMostPackSum - b ? kMostPackSum : a + b; }

// length(i) returns the length of row i.
template <class Memory, class Length, class Barrier>
RLK_HD void scan_lengths(const PackLayoutParams& p, int thread, PackScanShared& shared, const Length& length,
                         const Barrier& barrier) {
  std::int32_t* cu_seqlens = Memory::global(p.cu_seqlens);
  const auto slot = [&](int i) -> std::int32_t& {
    return shared.lengths[i / kPackScanLengths].of[i % kPackScanLengths];
  };
  std::int64_t ahead[kPackScanLengths];
  const auto read = [&](std::int64_t tile) {
    RLK_UNROLL
    for (int k = 0; k < kPackScanLengths; ++k) {
      const std::int64_t i = tile + k * kPackScanThreads + thread, last = p.num_sequences - 1;
      ahead[k] = length(i < last ? i : last);  // no branch, so that all loads are in flight together
    }
  };
  if (thread == 0) shared.status = 0;
  const auto capacity = static_cast<std::uint32_t>(p.capacity);
  std::uint32_t before = 0;
  if (p.num_sequences > 0) read(0);
  barrier();
  RLK_UNROLL_NOT
  for (std::int64_t tile = 0; tile < p.num_sequences; tile += kPackScanTile) {
    RLK_UNROLL
    for (int k = 0; k < kPackScanLengths; ++k) {
      if (tile + k * kPackScanThreads + thread >= p.num_sequences) ahead[k] = 0;
      const std::int64_t clamped = ahead[k] < 0 ? 0 : ahead[k] > p.num_tokens ? p.num_tokens : ahead[k];
      if (clamped != ahead[k]) shared.status = kPackBadLength;
      slot(k * kPackScanThreads + thread) = static_cast<std::int32_t>(clamped);
    }
    if (tile + kPackScanTile < p.num_sequences) read(tile + kPackScanTile);
    barrier();
    std::int32_t mine[kPackScanLengths];
    RLK_UNROLL
    for (int k = 0; k < kPackScanLengths; ++k) mine[k] = shared.lengths[thread].of[k];
    std::uint32_t of_thread = 0;
    RLK_UNROLL
    for (int k = 0; k < kPackScanLengths; ++k) {
      of_thread = pack_sum(of_thread, static_cast<std::uint32_t>(mine[k]));
    }
    shared.sums[0][thread] = of_thread;
    barrier();
    int from = 0;
    RLK_UNROLL_NOT  // if the loop were unrolled, its conditions would need more scalar registers than there are
        for (int distance = 1; distance < kPackScanThreads; distance *= 2, from ^= 1) {
      const std::uint32_t more = thread >= distance ? shared.sums[from][thread - distance] : 0;
      shared.sums[from ^ 1][thread] = pack_sum(shared.sums[from][thread], more);
      barrier();
    }
    std::uint32_t sum = thread == 0 ? before : pack_sum(before, shared.sums[from][thread - 1]);
    before = pack_sum(before, shared.sums[from][kPackScanThreads - 1]);
    RLK_UNROLL
    for (int k = 0; k < kPackScanLengths; ++k) {
      sum = pack_sum(sum, static_cast<std::uint32_t>(mine[k]));
      shared.lengths[thread].of[k] = static_cast<std::int32_t>(sum < capacity ? sum : capacity);
    }
    barrier();
    RLK_UNROLL
    for (int k = 0; k < kPackScanLengths; ++k) {
      const std::int64_t i = tile + k * kPackScanThreads + thread;
      if (i < p.num_sequences) cu_seqlens[i + 1] = slot(k * kPackScanThreads + thread);
    }
    // No barrier is needed here: each thread writes the next tile's lengths only to slots that it alone has just read.
  }
  if (thread != 0) return;
  cu_seqlens[0] = 0;
  *Memory::global(p.status) = shared.status | (before > capacity ? kPackOverflow : 0);
}

}  // namespace pack_detail

// Scans the caller's lengths. With a mask it scans the lengths that the pass over the mask left in cu_seqlens.
// barrier() synchronises the block.
template <class Memory, class Barrier>
RLK_HD void pack_scan_block(const PackLayoutParams& p, int thread, PackScanShared& shared, const Barrier& barrier) {
  const auto scan = [&](const auto* lengths) {
    const auto* from = Memory::global(lengths);
    pack_detail::scan_lengths<Memory>(
        p, thread, shared, [from](std::int64_t i) { return std::int64_t{from[i]}; }, barrier);
  };
  if (p.mask.data != nullptr) {
    scan(p.cu_seqlens + 1);
  } else if (p.lengths_dtype == DType::kInt64) {
    scan(static_cast<const std::int64_t*>(p.lengths));
  } else {
    scan(static_cast<const std::int32_t*>(p.lengths));
  }
}

}  // namespace rlk
