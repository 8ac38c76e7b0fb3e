// covariance_mask on GPUs of every vendor: a radix select over the slots (places) of the token arrays, highest digit
// first. kernels/tokens/passes.h has the earlier passes. The output array first holds covariances, then priorities, and
// finally the mask.
//   clear       zeroes the counts
//   priorities  writes candidates' priorities and counts their first digits
//   digits      counts the next digit of candidates whose higher digits equal those of the last chosen key
//   write       writes the mask
// The last chosen key is the key at which the selection ends. Each block derives the known digits of this key from the
// earlier counts by itself. Counts are integers, so the order of atomics has no effect.
#pragma once

#include "kernels/losses/covariance_terms.h"
#include "kernels/tokens/passes.h"

namespace rlk {

constexpr int kSelectThreads = 256;
using CovarianceWorkspace = TokenWorkspace<CovarianceBatch>;

// Calls run(previous, pass) for each pass that a call with `count` slots needs, except pass 0. The function skips a
// pass whose digit is 0 for all slots, but never the last pass.
template <class F>
void for_each_digit(std::int64_t count, const F& run) {
  for (int previous = 0, pass = 1; pass < kSelectPasses; ++pass) {
    if (select_shift(pass) < 32 && pass < kSelectPasses - 1 && count <= std::int64_t{1} << select_shift(pass)) continue;
    run(previous, pass);
    previous = pass;
  }
}
constexpr std::int64_t kClearBlocks = kSelectPasses * kSelectBins / kSelectThreads;
static_assert(kSelectBins % kSelectThreads == 0);

struct SelectShared {
  std::uint32_t counts[kSelectBins];
  std::uint32_t sums[kSelectThreads];
  SelectState found;
};

template <class Gpu>
RLK_DEVICE void covariance_clear(const CovarianceWorkspace& w, std::int64_t block) {
  (&in_global(w.shared)->counts[0][0])[block * kSelectThreads + Gpu::thread()] = 0;
}

// Returns the state of the select after the counts of `pass`. The state holds the digits of the last chosen key that
// are known so far. All threads of the block must call this function.
template <class Gpu>
RLK_DEVICE SelectState narrowed(const CovarianceShared* of, int pass, SelectShared* shared) {
  constexpr int kEach = kSelectBins / kSelectThreads;
  const int thread = Gpu::thread();
  const SelectState before = of->state[pass];
  if (before.remaining == 0) return before;
  std::uint32_t counts[kEach], sum = 0;
  RLK_UNROLL
  for (int i = 0; i < kEach; ++i) {
    counts[i] = of->counts[pass][thread * kEach + i];
    sum += counts[i];
  }
  shared->sums[thread] = sum;
  Gpu::barrier();
  RLK_UNROLL_NOT
  for (int distance = 1; distance < kSelectThreads; distance *= 2) {
    const std::uint32_t other = thread >= distance ? shared->sums[thread - distance] : 0;
    Gpu::barrier();
    shared->sums[thread] += other;
    Gpu::barrier();
  }
  // No more than `remaining` candidates are left, so all of them are chosen.
  if (before.remaining >= shared->sums[kSelectThreads - 1]) return {~std::uint64_t{0}, 0};
  const int shift = select_shift(pass);
  const std::uint32_t end = shared->sums[thread], begin = end - sum;
  if (begin < before.remaining && before.remaining <= end) {
    std::uint32_t left = before.remaining - begin;
    bool found = false;
    RLK_UNROLL
    for (int i = 0; i < kEach; ++i) {
      if (found || left > counts[i]) {
        left -= found ? 0 : counts[i];
        continue;
      }
      found = true;
      const std::uint64_t prefix = before.prefix | static_cast<std::uint64_t>(thread * kEach + i) << shift;
      const bool all = left == counts[i];
      shared->found = {all ? prefix | ((std::uint64_t{1} << shift) - 1) : prefix, all ? 0 : left};
    }
  }
  Gpu::barrier();
  return shared->found;
}

template <class Gpu>
RLK_DEVICE void clear_counts(SelectShared* shared) {
  for (int b = Gpu::thread(); b < kSelectBins; b += kSelectThreads) shared->counts[b] = 0;
  Gpu::barrier();
}
template <class Gpu>
RLK_DEVICE void add_counts(CovarianceShared* of, int pass, const SelectShared* shared) {
  Gpu::barrier();
  for (int b = Gpu::thread(); b < kSelectBins; b += kSelectThreads) {
    if (const std::uint32_t count = shared->counts[b]; count > 0) Gpu::count_on(&of->counts[pass][b], count);
  }
}
template <class Gpu, class F>
RLK_DEVICE void for_each_slot(std::int64_t count, std::int64_t block, std::int64_t blocks, const F& run) {
  for (std::int64_t i = block * kSelectThreads + Gpu::thread(); i < count; i += blocks * kSelectThreads) run(i);
}

// The sequence that a slot belongs to. With bad offsets the result is still a valid index of a sequence, but an
// arbitrary one.
RLK_DEVICE std::int64_t sequence_at(const Sequences& q, std::int64_t slot) {
  if (!q.packed()) {
    return static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(q.num_tokens);
  }
  std::int64_t low = 0, high = q.num_sequences;  // `low` becomes the last sequence that begins at or before the slot
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (offset_at<GlobalMemory>(q.offsets(), middle) <= slot ? low : high) = middle;
  }
  return low;
}

RLK_DEVICE std::uint64_t select_key(float priority, std::int64_t slot) {
  return std::uint64_t{static_cast<std::uint32_t>(bits_of(priority))} << 32 | static_cast<std::uint64_t>(slot);
}

template <class Gpu>
RLK_DEVICE void covariance_priorities(const CovarianceMaskParams& p, const CovarianceWorkspace& w, std::int64_t count,
                                      std::int64_t block, std::int64_t blocks, SelectShared* shared) {
  float* const values = in_global(p.selected);
  clear_counts<Gpu>(shared);
  for_each_slot<Gpu>(count, block, blocks, [&](std::int64_t i) {
    const float c = values[i];
    if (bits_of(c) == kNoCandidate) return;
    std::uint32_t priority;
    if (p.kind != CovarianceKind::kClip) {
      priority = largest_first(c);
    } else {
      const std::int64_t s = sequence_at(p.sequences, i);
      const Sequences& q = p.sequences;
      priority =
          draw_priority(p.seed, s, i - (q.packed() ? offset_at<GlobalMemory>(q.offsets(), s) : s * q.num_tokens));
    }
    values[i] = float_of(static_cast<std::int32_t>(priority));
    Gpu::count_on(&shared->counts[priority >> (select_shift(0) - 32)], 1u);
  });
  add_counts<Gpu>(in_global(w.shared), 0, shared);
}

// Counts the digits of `pass` among candidates that have the digits known after pass `previous`.
template <class Gpu>
RLK_DEVICE void covariance_digits(const CovarianceMaskParams& p, const CovarianceWorkspace& w, std::int64_t count,
                                  int previous, int pass, std::int64_t block, std::int64_t blocks,
                                  SelectShared* shared) {
  CovarianceShared* const of = in_global(w.shared);
  const float* const values = in_global(p.selected);
  const SelectState state = narrowed<Gpu>(of, previous, shared);
  if (block == 0 && Gpu::thread() == 0) of->state[pass] = state;
  if (state.remaining == 0) return;
  const int known = select_shift(previous), shift = select_shift(pass);
  const std::uint64_t mask = (std::uint64_t{1} << (select_shift(pass - 1) - shift)) - 1;
  clear_counts<Gpu>(shared);
  for_each_slot<Gpu>(count, block, blocks, [&](std::int64_t i) {
    const float priority = values[i];
    if (bits_of(priority) == kNoCandidate) return;
    const std::uint64_t key = select_key(priority, i);
    if ((key ^ state.prefix) >> known == 0) Gpu::count_on(&shared->counts[key >> shift & mask], 1u);
  });
  add_counts<Gpu>(of, pass, shared);
}

template <class Gpu>
RLK_DEVICE void covariance_write(const CovarianceMaskParams& p, const CovarianceWorkspace& w, std::int64_t count,
                                 std::int64_t block, std::int64_t blocks, SelectShared* shared) {
  const CovarianceShared* const of = in_global(w.shared);
  float* const values = in_global(p.selected);
  const std::uint64_t last = narrowed<Gpu>(of, kSelectPasses - 1, shared).prefix;
  const float otherwise = of->broken != 0 ? canonical_nan() : 0.0f, chosen = of->broken != 0 ? otherwise : 1.0f;
  for_each_slot<Gpu>(count, block, blocks, [&](std::int64_t i) {
    const float priority = values[i];
    const bool is_one = bits_of(priority) != kNoCandidate && is_chosen(p.kind, select_key(priority, i), last);
    values[i] = is_one ? chosen : otherwise;
  });
}

}  // namespace rlk
