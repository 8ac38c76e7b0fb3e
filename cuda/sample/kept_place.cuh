// The place of a row's kept set among those of all rows. A block publishes its row's count and waits for the counts of
// earlier rows. Blocks begin in the order of their rows, so each of these counts comes.
#pragma once

#include "rlk/kernels/sample_check.h"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// By all threads of a kernel that precedes the one that publishes counts.
__device__ __forceinline__ void clear_published(const SampleChunk& chunk) {
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < chunk.rows; i += threads) {
    chunk.states[i].published = 0;
  }
}
__device__ __forceinline__ void publish_count(SampleState* state, std::int64_t count) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&state->published), "l"(count + 1) : "memory");
}
__device__ __forceinline__ std::int64_t published_count(const SampleState* state) {
  std::int64_t published;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(published) : "l"(&state->published) : "memory");
  } while (published == 0);
  return published - 1;
}
// The end of the last kept set of the chunk's first `rows` rows that fits; the first set begins at `begin`.
__device__ __forceinline__ std::int64_t end_of_fitting(const SampleParams& p, const SampleChunk& chunk,
                                                       std::int64_t begin, std::int64_t rows) {
  std::int64_t end = begin;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t next = end + published_count(chunk.states + i);
    if (next > p.kept_capacity) break;
    end = next;
  }
  return end;
}

// Writes the row's offset, and its status if its `count` ids do not fit. Returns where they begin, or -1 if there are
// none to write. By a warp whose first lane has written the row's results.
__device__ __forceinline__ std::int64_t place_of_kept(const SampleParams& p, const SampleChunk& chunk, std::int64_t row,
                                                      std::int64_t count) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t i = row - chunk.first;
  // Read before the count is published: the last row's block, which waits for all counts, changes it.
  const bool was_closed = chunk.first > 0 && *static_cast<volatile const std::uint32_t*>(chunk.closed) != 0;
  const std::int64_t base = chunk.first > 0 ? p.kept_offsets[chunk.first] : 0;
  __syncwarp();
  if (lane == 0) publish_count(chunk.states + i, count);
  std::int64_t before = 0;
  for (std::int64_t k = lane; k < i; k += kWarp) before += published_count(chunk.states + k);
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) before += __shfl_xor_sync(kAllLanes, before, d);
  const std::int64_t begin = base + before, end = begin + count;
  const bool fits = !was_closed && end <= p.kept_capacity;
  if (lane == 0) {
    if (row == 0) p.kept_offsets[0] = 0;
    p.kept_offsets[row + 1] = fits ? end : was_closed ? base : end_of_fitting(p, chunk, base, i);
    if (!fits && count > 0) {
      p.status[row] |= kKeptOverflow;
      if (p.logprob != nullptr) p.logprob[row] = canonical_nan();
    }
    if (i + 1 == chunk.rows) *chunk.closed = fits ? 0 : 1;
  }
  return fits && count > 0 ? begin : -1;
}

}  // namespace
}  // namespace rlk::cuda
