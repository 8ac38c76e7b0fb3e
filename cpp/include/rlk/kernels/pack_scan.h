// The prefix sum of pack_layout as one block of a GPU does it, for CUDA and HIP: a thread adds a run of lengths, the block
// scans the runs' sums, each thread goes over its run again.
#pragma once

#include <cstdint>

#include "rlk/ops/pack.h"

namespace rlk {

constexpr int kPackScanThreads = 1024;

// Lengths of rows: the caller's, or what the pass over the mask left in cu_seqlens.
struct PackRun {
  std::int64_t first, last;  // of a thread
  std::int64_t sum = 0;
  std::int32_t status = 0;
};
template <class Memory>
RLK_HD std::int64_t pack_length(const PackLayoutParams& p, std::int64_t i) {
  if (p.mask.data != nullptr) return Memory::global(p.cu_seqlens)[i + 1];
  if (p.lengths_dtype == DType::kInt64) return Memory::global(static_cast<const std::int64_t*>(p.lengths))[i];
  return Memory::global(static_cast<const std::int32_t*>(p.lengths))[i];
}
RLK_HD std::int64_t pack_clamped(const PackLayoutParams& p, std::int64_t length) {
  return length < 0 ? 0 : length > p.num_tokens ? p.num_tokens : length;
}
template <class Memory>
RLK_HD PackRun pack_run(const PackLayoutParams& p, int thread) {
  const std::int64_t of_thread = (p.num_sequences + kPackScanThreads - 1) / kPackScanThreads;
  PackRun run{};
  run.first = thread * of_thread;
  run.last = run.first + of_thread < p.num_sequences ? run.first + of_thread : p.num_sequences;
  for (std::int64_t i = run.first; i < run.last; ++i) {
    const std::int64_t length = pack_length<Memory>(p, i), clamped = pack_clamped(p, length);
    run.sum += clamped;
    if (length != clamped) run.status |= kPackBadLength;
  }
  return run;
}
// `before`: the sum of the threads before this one.
template <class Memory>
RLK_HD void pack_write_run(const PackLayoutParams& p, const PackRun& run, std::int64_t before) {
  std::int32_t* cu_seqlens = Memory::global(p.cu_seqlens);
  for (std::int64_t i = run.first; i < run.last; ++i) {
    before += pack_clamped(p, pack_length<Memory>(p, i));  // read before it is overwritten
    cu_seqlens[i + 1] = static_cast<std::int32_t>(before < p.capacity ? before : p.capacity);
  }
}

}  // namespace rlk
