// What operators over sequences share: masks of tokens, the spans of sequences in padded and packed arrays, and the search
// for a token's sequence. For hosts and kernels of every backend.
//
// Padded: sequence i is row i of [num_sequences, num_tokens]. Packed: it is tokens [cu_seqlens[i], cu_seqlens[i + 1]) of
// [num_tokens]; what follows the last one belongs to no sequence.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "rlk/base.h"
#include "rlk/unroll.h"

namespace rlk {

// Flags of tokens: an element that is not zero counts. -0 is zero, NaN is not.
struct TokenFlags {
  const void* data = nullptr;   // null: every token counts
  std::int64_t row_stride = 0;  // elements; columns are contiguous
  std::int32_t bytes = 0;       // of an element: 1, 2, 4 or 8
  bool is_float = false;

  // The bits of an element that make it count.
  RLK_HD std::uint64_t bits() const {
    return bytes == 0 ? 1 : ~std::uint64_t{0} >> (64 - 8 * bytes + (is_float ? 1 : 0));
  }
};

struct Offsets {
  const void* data = nullptr;  // [num_sequences + 1] int32 or int64, contiguous; null: the arrays are padded
  DType dtype = DType::kInt32;
};

// A pointer into memory that all threads share, for code that runs on a GPU: HIP's compiler wants to be told.
struct PlainMemory {
  template <class T>
  static RLK_HD T* global(T* p) {
    return p;
  }
};

template <class Memory = PlainMemory>
RLK_HD std::int64_t offset_at(const Offsets& o, std::int64_t i) {
  if (o.dtype == DType::kInt64) return Memory::global(static_cast<const std::int64_t*>(o.data))[i];
  return Memory::global(static_cast<const std::int32_t*>(o.data))[i];
}

// Where a sequence lies. `good` is false where its offsets are not 0 <= begin <= end <= num_tokens, or where it is the
// first one and does not begin at 0: then its length is 0.
struct Span {
  std::int64_t begin, length;
  bool good;
};
template <class Memory = PlainMemory>
RLK_HD Span span_of(const Offsets& o, std::int64_t num_tokens, std::int64_t sequence) {
  if (o.data == nullptr) return {0, num_tokens, true};
  const std::int64_t begin = offset_at<Memory>(o, sequence), end = offset_at<Memory>(o, sequence + 1);
  const bool good = begin >= 0 && begin <= end && end <= num_tokens && (sequence != 0 || begin == 0);
  return {good ? begin : 0, good ? end - begin : 0, good};
}

// Sequences [low, high).
struct SequenceRange {
  std::int64_t low = 0, high = 0;
};

// Which of them has a packed token, or -1 where no good one does. Of offsets that do not ascend it may be any that has it.
template <class Memory = PlainMemory>
RLK_HD std::int64_t sequence_of(const Offsets& o, const SequenceRange& range, std::int64_t num_tokens,
                                std::int64_t token) {
  std::int64_t low = range.low, high = range.high;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    const bool before = offset_at<Memory>(o, middle) <= token;
    low = before ? middle : low;
    high = before ? high : middle;
  }
  if (range.high <= range.low) return -1;
  const Span span = span_of<Memory>(o, num_tokens, low);
  return token >= span.begin && token < span.begin + span.length ? low : -1;
}

// Flags of kBytes, 0 for none, from one on: without branches, so that the loads of several tokens are under way together.
template <int kBytes, class Memory = PlainMemory>
struct FlagsFrom {
  using Flag = std::conditional_t<
      kBytes == 8, std::uint64_t,
      std::conditional_t<kBytes == 4, std::uint32_t, std::conditional_t<kBytes == 2, std::uint16_t, std::uint8_t>>>;
  const Flag* flags;
  Flag bits;
  RLK_HD FlagsFrom(const TokenFlags& m, std::int64_t first)
      : flags(static_cast<const Flag*>(m.data) + (kBytes == 0 ? 0 : first)), bits(static_cast<Flag>(m.bits())) {}
  RLK_HD Flag load(std::int64_t i) const { return kBytes == 0 ? Flag{1} : Memory::global(flags)[i]; }
  RLK_HD bool counts(Flag flag) const { return kBytes < 2 ? flag != 0 : (flag & bits) != 0; }
};
// f(std::integral_constant<int, bytes of a flag>).
template <class F>
RLK_HD void with_flag_bytes(const TokenFlags& m, const F& f) {
  switch (m.bytes) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
    case 8:
      return f(std::integral_constant<int, 8>{});
    default:
      return f(std::integral_constant<int, 0>{});
  }
}

template <class Memory = PlainMemory>
RLK_HD bool counts(const TokenFlags& m, std::int64_t i) {
  bool counted = true;
  with_flag_bytes(m, [&](auto bytes) {
    const FlagsFrom<decltype(bytes)::value, Memory> flags(m, i);
    counted = flags.counts(flags.load(0));
  });
  return counted;
}

// For backends: what would corrupt memory.
inline void check_mask(const TokenFlags& m) {
  RLK_CHECK(m.data == nullptr ? m.bytes == 0 : m.bytes == 1 || m.bytes == 2 || m.bytes == 4 || m.bytes == 8,
            "mask: elements of 1, 2, 4 or 8 bytes");
}
inline void check_offsets(const Offsets& o) {
  RLK_CHECK(o.dtype == DType::kInt32 || o.dtype == DType::kInt64, "cu_seqlens: int32 or int64");
}

// For the CPU backend, before it writes anything.
inline void check_offset_values(const Offsets& o, std::int64_t num_sequences, std::int64_t num_tokens) {
  if (o.data == nullptr) return;
  if (offset_at(o, 0) != 0) {
    throw InvalidArgument("cu_seqlens: expected 0 as its first element, got " + std::to_string(offset_at(o, 0)));
  }
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    const std::int64_t begin = offset_at(o, i), end = offset_at(o, i + 1);
    if (begin <= end && end <= num_tokens) continue;
    throw InvalidArgument("cu_seqlens: expected ascending offsets of at most " + std::to_string(num_tokens) +
                          " (the tokens), got " + std::to_string(begin) + ", " + std::to_string(end) + " at " +
                          std::to_string(i));
  }
}

}  // namespace rlk
