// Finds the place of a row's kept set among the kept sets of all rows. A block publishes the number of its row's kept
// columns, and waits for the counts of earlier rows. This wait cannot deadlock: blocks start in the order of their
// rows, so the blocks of earlier rows are running or done.
#pragma once

#include "kernels/sample/check.h"
#include "masses.cuh"
#include "team.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// Clears the published counts. A kernel that runs before the kernel that publishes counts calls this function in all of
// its threads.
__device__ __forceinline__ void clear_published(const SampleChunk& chunk) {
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < chunk.rows; i += threads) {
    chunk.states[i].published = 0;
  }
}
// `orders`: a fence makes sure that this thread's earlier reads come before the count becomes visible to the blocks of
// later rows.
__device__ __forceinline__ void publish_count(SampleState* state, std::int64_t count, bool orders) {
  if (orders) __threadfence();
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&state->published), "l"(count + 1) : "memory");
}
__device__ __forceinline__ std::int64_t published_count(const SampleState* state) {
  std::int64_t published;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(published) : "l"(&state->published) : "memory");
  } while (published == 0);
  return published - 1;
}
// The end of the last kept set that fits, among the chunk's first `rows` rows. The first set begins at `begin`.
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

// Finds the place of a row's kept set, in the row's block. One thread publishes the count, and then places the set.
class KeptPlace {
 public:
  __device__ __forceinline__ KeptPlace(const SampleParams& p, const SampleChunk& chunk, std::int64_t i)
      : p_(p), chunk_(chunk), i_(i) {}

  __device__ __forceinline__ const SampleChunk& chunk() const { return chunk_; }
  __device__ __forceinline__ std::int64_t number() const { return i_; }
  // One thread calls this function as soon as the count is known; a second call does nothing.
  __device__ __forceinline__ void publish(std::int64_t count) {
    if (published_) return;
    published_ = true;
    // `closed` is read before the count is published, because the last row's block changes `closed` once it has all
    // counts.
    was_closed_ = chunk_.first > 0 && *static_cast<volatile const std::uint32_t*>(chunk_.closed) != 0;
    publish_count(chunk_.states + i_, count, chunk_.first > 0);
  }
  __device__ __forceinline__ bool is_first() const { return i_ == 0; }
  __device__ __forceinline__ const std::int32_t* listed_ids() const { return ids_of_list(chunk_, i_); }
  // The sum of every `step`-th count of the rows before this row, from row `from` of the chunk on.
  __device__ __forceinline__ std::uint64_t counts_before(int from, int step) const {
    std::uint64_t sum = 0;
#pragma unroll 1
    for (std::int64_t k = from; k < i_; k += step) {
      sum += static_cast<std::uint64_t>(published_count(chunk_.states + k));
    }
    // Orders these reads before this block's change of `closed`.
    if (chunk_.first > 0 && i_ + 1 == chunk_.rows) __threadfence();
    return sum;
  }
  // Writes the row's offset. The thread that published the count calls this function. `before`: the sum of the counts
  // of all earlier rows. Returns where the `count` ids begin, or -1 if no ids are to be written.
  __device__ __forceinline__ std::int64_t place(std::int64_t before, std::int64_t count) {
    const std::int64_t base = chunk_.first > 0 ? p_.kept_offsets[chunk_.first] : 0;
    const std::int64_t begin = base + before, end = begin + count;
    const bool fits = !was_closed_ && end <= p_.kept_capacity;
    const std::int64_t row = chunk_.first + i_;
    if (row == 0) p_.kept_offsets[0] = 0;
    p_.kept_offsets[row + 1] = fits ? end : was_closed_ ? base : end_of_fitting(p_, chunk_, base, i_);
    overflows_ = !fits && count > 0;
    if (i_ + 1 == chunk_.rows) *chunk_.closed = fits ? 0 : 1;
    return fits && count > 0 ? begin : -1;
  }
  // Marks a row whose ids do not fit. The thread that called place() calls this function after the row's other results
  // are written.
  __device__ __forceinline__ void mark_overflow() const {
    if (!overflows_) return;
    const std::int64_t row = chunk_.first + i_;
    p_.status[row] |= kKeptOverflow;
    if (p_.logprob != nullptr) p_.logprob[row] = canonical_nan();
  }

 private:
  const SampleParams& p_;
  const SampleChunk& chunk_;
  const std::int64_t i_;  // the row's number in the chunk
  bool published_ = false, was_closed_ = false, overflows_ = false;
};

}  // namespace
}  // namespace rlk::cuda
