// PolicySequences of tokens, padded or packed, and arrays over their tokens: what the contracts of objectives share.
//
// Padded: [num_sequences, num_tokens], a row a sequence. Packed: [num_tokens], sequence s in [cu_seqlens[s],
// cu_seqlens[s + 1]). A position is an index into a row or a sequence, so a packed sequence and the same one in a row,
// with masked slots behind it, have the same sums:
//   the sum over a sequence is the perfect binary tree over the position, that over sequences the tree over their index
//   (math/tree_sum.h); what is missing or masked is +0, and a zero sum is +0.
// Nothing in a masked slot decides a bit.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

// The same pointer, known not to be one into a block's own memory.
template <class T>
RLK_HD T* in_global(T* p) {
#if defined(__HIP_DEVICE_COMPILE__)
  return (T*)(__attribute__((address_space(1))) T*)p;
#elif defined(__CUDA_ARCH__)
  return static_cast<T*>(__cvta_global_to_generic(__cvta_generic_to_global(p)));
#else
  return p;
#endif
}

// What the sum over tokens, or over sequences, is divided by where a caller gives no number.
enum class DenominatorKind : std::int32_t { kOne, kTokens, kSequences, kSequencesWithTokens };

struct PolicyTokens {
  const float* data = nullptr;
  std::int64_t sequence_stride = 0;  // elements; of packed sequences only where token_stride is 0
  std::int64_t token_stride = 1;     // 0: one value a sequence
};

struct PolicyMask {
  const void* data = nullptr;  // a token counts where its element is not zero; null: every token does
  std::int64_t sequence_stride = 0;
  DType dtype = DType::kBool;  // kBool, kUInt8, kInt32, kInt64, kFloat32
};

struct PolicySequences {
  const void* cu_seqlens = nullptr;  // [num_sequences + 1], ascending from 0 to num_tokens; null: padded
  DType cu_dtype = DType::kInt32;    // kInt32, kInt64
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;  // slots of each padded sequence, or of all packed ones
  RLK_HD bool packed() const { return cu_seqlens != nullptr; }
  std::int64_t num_slots() const { return packed() ? num_tokens : num_sequences * num_tokens; }
};

struct PolicySpan {
  std::int64_t begin, length;  // of packed arrays; a padded sequence begins at 0 of its row
};

RLK_HD std::int64_t cut_of(const PolicySequences& q, std::int64_t i) {
  if (q.cu_dtype == DType::kInt64) return in_global(static_cast<const std::int64_t*>(q.cu_seqlens))[i];
  return in_global(static_cast<const std::int32_t*>(q.cu_seqlens))[i];
}
// Inside of the arrays whatever the cuts are: on a GPU nobody has looked at them.
RLK_HD PolicySpan span_of(const PolicySequences& q, std::int64_t s) {
  if (!q.packed()) return {0, q.num_tokens};
  const auto clamped = [&](std::int64_t i) { return i < 0 ? 0 : i > q.num_tokens ? q.num_tokens : i; };
  const std::int64_t begin = clamped(cut_of(q, s)), end = clamped(cut_of(q, s + 1));
  return {begin, end < begin ? 0 : end - begin};
}
// Whether the cuts around sequence s are what they must be, those beside them included: of two that do not ascend nobody
// knows which is wrong, so that every sequence that begins or ends at one of them is in doubt.
RLK_HD bool are_cuts_good(const PolicySequences& q, std::int64_t s) {
  const std::int64_t begin = cut_of(q, s), end = cut_of(q, s + 1);
  const bool begins = s > 0 ? cut_of(q, s - 1) <= begin : begin == 0;
  const bool ends = s + 1 < q.num_sequences ? end <= cut_of(q, s + 2) : end == q.num_tokens;
  return 0 <= begin && begin <= end && end <= q.num_tokens && begins && ends;
}
RLK_HD bool has_bad_cuts(const PolicySequences& q, std::int64_t s) { return q.packed() && !are_cuts_good(q, s); }

// Offset of a sequence's first element.
RLK_HD std::int64_t offset_of(const PolicyTokens& a, const PolicySequences& q, std::int64_t s, const PolicySpan& span) {
  return q.packed() && a.token_stride != 0 ? span.begin : s * a.sequence_stride;
}

// Work is cut into tiles of 2^tile positions of a sequence. Each has a slot of its own in a workspace: of packed
// sequences floor(begin / 2^tile) + s is the first, which leaves slots unused and needs no sum over the others' lengths.
RLK_HD std::int64_t tiles_of(std::int64_t length, int tile) { return (length + (std::int64_t{1} << tile) - 1) >> tile; }
RLK_HD std::int64_t first_slot(const PolicySequences& q, std::int64_t s, int tile) {
  if (!q.packed()) return s * tiles_of(q.num_tokens, tile);
  return (span_of(q, s).begin >> tile) + s;
}
inline std::int64_t workspace_slots(const PolicySequences& q, int tile) {
  if (!q.packed()) return q.num_sequences * tiles_of(q.num_tokens, tile);
  return (q.num_tokens >> tile) + q.num_sequences;
}
// The sequence of a slot: the last one that begins no later. Slots are fewer than 2^31.
RLK_HD std::int64_t sequence_of_slot(const PolicySequences& q, std::int64_t slot, int tile) {
  if (!q.packed()) {
    return static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(tiles_of(q.num_tokens, tile));
  }
  std::int64_t low = 0, high = q.num_sequences;  // first_slot(low) <= slot < first_slot(high)
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (first_slot(q, middle, tile) <= slot ? low : high) = middle;
  }
  return low;
}

}  // namespace rlk
