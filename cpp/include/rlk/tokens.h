// THE model of sequences of tokens, for every operator, on host and GPU (docs/tokens.md): masks, offsets, spans.
//
// Padded: [num_sequences, num_tokens], sequence s is row s. Packed: [num_tokens], sequence s is tokens [cu_seqlens[s],
// cu_seqlens[s + 1]). Tokens after the last offset belong to no sequence: they are not read, never count, and have
// outputs of +0. A position is an index into a sequence.
//
// A sum is a perfect binary tree (math/tree_sum.h): over the positions in a sequence, then over the index of the
// sequences. A missing or masked term is +0, and a zero sum is +0. A slot is the place of a token in an array: [slots]
// is the shape of an array with num_sequences * num_tokens elements if padded, and num_tokens if packed. No result
// depends on what a masked slot holds.
//
// Offsets begin with 0, do not descend and are at most num_tokens. For other offsets the CPU throws InvalidArgument
// before it writes anything (check_offset_values). A GPU reads and writes nothing outside the arrays, whatever the
// offsets are.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "rlk/base.h"
#include "rlk/load_index.h"
#include "rlk/unroll.h"

namespace rlk {

// Returns the pointer unchanged, and tells the compiler that it points to global memory, never to shared memory.
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
// Access to global memory, which all threads share, for templates that run on a GPU.
struct PlainMemory {
  template <class T>
  static RLK_HD T* global(T* p) {
    return p;
  }
};
struct GlobalMemory {
  template <class T>
  static RLK_HD T* global(T* p) {
    return in_global(p);
  }
};

// A mask: a token counts if its element is neither zero nor -0; NaN counts. Elements are bool, integers, or floats of
// 16 bits and more. A mask stores the width of its dtype and whether the dtype is a float; nothing else of the dtype
// matters.
struct TokenMask {
  const void* data = nullptr;   // null: every token counts
  std::int64_t row_stride = 0;  // in elements; columns are contiguous
  std::int32_t bytes = 0;       // bytes per element: 1, 2, 4 or 8; 0 without data
  bool is_float = false;

  // The bits that make an element count, as a T: all bits except the sign of a float.
  RLK_HD std::uint64_t bits() const {
    return bytes == 0 ? 1 : ~std::uint64_t{0} >> (64 - 8 * bytes + (is_float ? 1 : 0));
  }
  template <class T>
  RLK_HD T bits() const {
    const T all = static_cast<T>(~T{0});
    return is_float ? static_cast<T>(all >> 1) : all;
  }
};
// Mask of an array whose dtype is a DType.
inline TokenMask mask_of(const void* data, std::int64_t row_stride, DType dtype) {
  const bool is_float = dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  return {data, row_stride, data == nullptr ? 0 : size_of(dtype), is_float};
}

// Reads consecutive elements of a mask, each of kBytes bytes. If kBytes is 0, there is no mask. load() and counts()
// have no branches, so the loads of several tokens are in flight together.
template <int kBytes, class Memory = PlainMemory>
struct FlagsFrom {
  using Flag = std::conditional_t<
      kBytes == 8, std::uint64_t,
      std::conditional_t<kBytes == 4, std::uint32_t, std::conditional_t<kBytes == 2, std::uint16_t, std::uint8_t>>>;
  const Flag* flags;
  Flag bits;
  RLK_HD FlagsFrom(const TokenMask& m, std::int64_t first)
      : flags(static_cast<const Flag*>(m.data) + (kBytes == 0 ? 0 : first)), bits(m.bits<Flag>()) {}
  RLK_HD Flag load(std::int64_t i) const { return kBytes == 0 ? Flag{1} : Memory::global(flags)[i]; }
  RLK_HD bool counts(Flag flag) const { return kBytes < 2 ? flag != 0 : (flag & bits) != 0; }
};
// Calls f with the number of bytes of the mask's elements, as a std::integral_constant.
template <class F>
RLK_HD void with_flag_bytes(const TokenMask& m, const F& f) {
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
RLK_HD bool counts(const TokenMask& m, std::int64_t i) {
  bool counted = true;
  with_flag_bytes(m, [&](auto bytes) {
    const FlagsFrom<decltype(bytes)::value, Memory> flags(m, i);
    counted = flags.counts(flags.load(0));
  });
  return counted;
}

struct Offsets {
  const void* data = nullptr;  // [num_sequences + 1] int32 or int64, contiguous; null: the arrays are padded
  DType dtype = DType::kInt32;
};
template <class Memory = PlainMemory>
RLK_HD std::int64_t offset_at(const Offsets& o, std::int64_t i) {
  if (o.dtype == DType::kInt64) return Memory::global(static_cast<const std::int64_t*>(o.data))[i];
  return Memory::global(static_cast<const std::int32_t*>(o.data))[i];
}

// How the tokens of an operator's arrays form sequences.
struct Sequences {
  const void* cu_seqlens = nullptr;  // [num_sequences + 1], cu_dtype; null: padded
  DType cu_dtype = DType::kInt32;    // kInt32, kInt64
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;  // tokens per row, or in the packed array
  RLK_HD bool packed() const { return cu_seqlens != nullptr; }
  RLK_HD Offsets offsets() const { return {cu_seqlens, cu_dtype}; }
  std::int64_t num_slots() const { return packed() ? num_tokens : num_sequences * num_tokens; }
};

// [num_sequences, num_tokens], tokens contiguous; packed [num_tokens] with row_stride 0.
template <class T>
struct TokenArray {
  T* data = nullptr;
  std::int64_t row_stride = 0;  // in elements
};
// A float32 array with one value per token, or with one value per sequence.
struct PolicyTokens {
  const float* data = nullptr;
  std::int64_t sequence_stride = 0;  // in elements; for packed sequences used only where token_stride is 0
  std::int64_t token_stride = 1;     // 0: one value per sequence
};

// Place of a sequence: its first token if packed, its row if padded.
struct TokenSpan {
  std::int64_t begin, length, row = 0;
  RLK_HD std::int64_t offset(std::int64_t row_stride) const { return row * row_stride + begin; }
};

RLK_HD std::int64_t clamp_index(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}
// [offsets[i], offsets[i + 1]) limited to [0, total], whatever the offsets are.
struct OffsetRange {
  std::int64_t begin, end;
};
template <class Memory = GlobalMemory>
RLK_HD OffsetRange range_of(const Offsets& o, std::int64_t i, std::int64_t total) {
  const std::int64_t begin = clamp_index(offset_at<Memory>(o, i), 0, total);
  return {begin, clamp_index(offset_at<Memory>(o, i + 1), begin, total)};
}
RLK_HD std::int64_t begin_of(const Sequences& q, std::int64_t s) {
  return clamp_index(offset_at<GlobalMemory>(q.offsets(), s), 0, q.num_tokens);
}
RLK_HD TokenSpan span_of(const Sequences& q, std::int64_t s) {
  if (!q.packed()) return {0, q.num_tokens, s};
  const OffsetRange r = range_of(q.offsets(), s, q.num_tokens);
  return {r.begin, r.end - r.begin};
}
// The tokens after the last offset; they belong to no sequence.
RLK_HD TokenSpan rest_of(const Sequences& q) {
  if (!q.packed()) return {0, 0};
  const std::int64_t begin = begin_of(q, q.num_sequences);
  return {begin, q.num_tokens - begin};
}

// Whether the offsets around sequence s are valid, including their neighbours. If an offset is below the offset before
// it, either of the two may be wrong. So every sequence that begins or ends at one of these two offsets is invalid.
RLK_HD bool are_offsets_good(const Offsets& o, std::int64_t num_sequences, std::int64_t num_tokens, std::int64_t s) {
  const auto at = [&](std::int64_t i) { return offset_at<GlobalMemory>(o, i); };
  const std::int64_t begin = at(s), end = at(s + 1);
  const bool begins = s > 0 ? at(s - 1) <= begin : begin == 0;
  const bool ends = s + 1 < num_sequences ? end <= at(s + 2) : true;
  return 0 <= begin && begin <= end && end <= num_tokens && begins && ends;
}
RLK_HD bool has_bad_offsets(const Sequences& q, std::int64_t s) {
  return q.packed() && !are_offsets_good(q.offsets(), q.num_sequences, q.num_tokens, s);
}

// Offset of a sequence's first element.
RLK_HD std::int64_t offset_of(const PolicyTokens& a, const Sequences& q, std::int64_t s, const TokenSpan& span) {
  return q.packed() && a.token_stride != 0 ? span.begin : s * a.sequence_stride;
}

// Place of a sequence that is skipped if its offsets are bad. `good` means 0 <= begin <= end <= num_tokens, and
// begin = 0 for the first sequence. If the offsets are bad, begin and length are 0.
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
// The sequence that has a packed token, or -1 if no valid sequence has it. If offsets descend, any sequence that has
// the token may be found.
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

// Divisor of the sum over tokens or sequences, used if the caller gives no number.
enum class DenominatorKind : std::int32_t { kOne, kTokens, kSequences, kSequencesWithTokens };

// Checks of memory safety, which backends call.
inline void check_mask(const TokenMask& m) {
  RLK_CHECK(m.data == nullptr ? m.bytes == 0 : m.bytes == 1 || m.bytes == 2 || m.bytes == 4 || m.bytes == 8,
            "mask: elements of 1, 2, 4 or 8 bytes");
}
inline void check_offsets(const Offsets& o) {
  RLK_CHECK(o.dtype == DType::kInt32 || o.dtype == DType::kInt64, "cu_seqlens: int32 or int64");
}
inline void check_sequences(const Sequences& q, const TokenMask& mask) {
  RLK_CHECK(q.num_sequences >= 0 && q.num_sequences < std::int64_t{1} << 31, "sequences: fewer than 2^31");
  RLK_CHECK(q.num_tokens >= 0 && q.num_tokens < std::int64_t{1} << 40, "sequences: fewer than 2^40 tokens");
  check_offsets(q.offsets());
  check_mask(mask);
}

// CPU backends call this function before they write anything. It checks that offsets [num + 1] begin at 0, do not
// descend and are at most `total`. `of` names `total` in the error. With `whole` the last offset must equal `total`.
inline void check_offset_values(const Offsets& o, std::int64_t num, std::int64_t total, const char* name = "cu_seqlens",
                                const char* of = "the number of tokens", bool whole = false) {
  if (o.data == nullptr) return;
  const auto refuse = [&](const std::string& expected, std::int64_t i, const std::string& after = "") {
    throw InvalidArgument(std::string(name) + ": expected " + expected + ", got " + std::to_string(offset_at(o, i)) +
                          after + " at index " + std::to_string(i));
  };
  const std::string most = std::to_string(total) + " (" + of + ")";
  if (offset_at(o, 0) != 0) refuse("0 first", 0);
  for (std::int64_t i = 1; i <= num; ++i) {
    const std::int64_t before = offset_at(o, i - 1);
    if (offset_at(o, i) < before) refuse("ascending offsets", i, " after " + std::to_string(before));
    if (offset_at(o, i) > total) refuse("at most " + most, i);
  }
  if (whole && offset_at(o, num) != total) refuse(most + " last", num);
}
inline void check_offset_values(const Sequences& q) { check_offset_values(q.offsets(), q.num_sequences, q.num_tokens); }

}  // namespace rlk
