// A sequence is cut into tiles of 2^tile positions. Each tile has its own slot in a workspace. The first slot of packed
// sequence s is floor(begin / 2^tile) + s. This numbering leaves some slots unused, but it needs no sum over the
// lengths of other sequences. Packed tokens outside every sequence have the last slots, as if they were the sequence
// with index num_sequences.
#pragma once

#include "rlk/math/ieee.h"
#include "rlk/tokens.h"

namespace rlk {

RLK_HD std::int64_t tiles_of(std::int64_t length, int tile) { return (length + (std::int64_t{1} << tile) - 1) >> tile; }
RLK_HD std::int64_t first_slot(const Sequences& q, std::int64_t s, int tile) {
  if (!q.packed()) return s * tiles_of(q.num_tokens, tile);
  return (begin_of(q, s) >> tile) + s;
}
inline std::int64_t workspace_slots(const Sequences& q, int tile) {
  if (!q.packed()) return q.num_sequences * tiles_of(q.num_tokens, tile);
  return (q.num_tokens >> tile) + q.num_sequences + 1;
}
// The number of sequences with slots. Packed tokens outside every sequence count as one sequence.
RLK_HD std::int64_t slotted_sequences(const Sequences& q) { return q.num_sequences + (q.packed() ? 1 : 0); }
RLK_HD bool is_rest(const Sequences& q, std::int64_t s) { return s == q.num_sequences; }
RLK_HD TokenSpan slotted_span(const Sequences& q, std::int64_t s) { return is_rest(q, s) ? rest_of(q) : span_of(q, s); }
// The sequence of a slot: the last sequence whose first slot is at or before the slot. There are fewer than 2^31 slots.
RLK_HD std::int64_t sequence_of_slot(const Sequences& q, std::int64_t slot, int tile) {
  if (!q.packed()) {
    return static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(tiles_of(q.num_tokens, tile));
  }
  std::int64_t low = 0, high = slotted_sequences(q);  // first_slot(low) <= slot < first_slot(high)
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first_slot(q, middle, tile) <= slot ? low : high) = middle;
  }
  return low;
}

// For operators with one block per sequence: the number of additional blocks, which write the outputs of packed tokens
// outside every sequence.
RLK_HD std::int64_t rest_blocks(const Sequences& q) {
  constexpr std::int64_t kEach = 8192, kMost = 32;
  return q.packed() ? clamp_index(q.num_tokens / kEach, 1, kMost) : 0;
}
// Block `part` of `parts` blocks, with `threads` threads, writes +0 to its share of the tokens outside every sequence.
// A null array is skipped.
template <class T>
RLK_HD void clear_rest(const Sequences& q, T* array, std::int64_t part, std::int64_t parts, int thread, int threads) {
  const TokenSpan rest = rest_of(q);
  if (array == nullptr) return;
  T* const to = in_global(array) + rest.begin;
  for (std::int64_t t = part * threads + thread; t < rest.length; t += parts * threads) to[t] = T{};
}

// The block of a sequence with bad offsets writes NaN to the sequence's tokens.
RLK_HD void spoil_sequence(float* array, const TokenSpan& span, std::int64_t row_stride, int thread, int threads) {
  if (array == nullptr) return;
  float* const to = in_global(array) + span.offset(row_stride);
  for (std::int64_t t = thread; t < span.length; t += threads) to[t] = canonical_nan();
}

}  // namespace rlk
