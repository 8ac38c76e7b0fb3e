// Labels and masks of single tokens, for the CPU, CUDA and HIP.
#pragma once

#include <type_traits>

#include "kernels/tokens/packed_tile.h"
#include "rlk/ops/shift_labels_packed.h"

namespace rlk {

template <class Memory>
RLK_HD std::int64_t integer_at(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kInt64) return Memory::global(static_cast<const std::int64_t*>(data))[i];
  return Memory::global(static_cast<const std::int32_t*>(data))[i];
}

// The quotient of two numbers that are not negative. The division has 32 bits if both numbers fit 32 bits.
RLK_HD std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

// How packed tokens are split among context-parallel ranks. searched(local) gives a packed token of the same sequence
// as the rank's own token `local`. With zigzag every sequence is split among all ranks.
struct LabelCut {
  std::int64_t first, step;
  bool zigzag;
  RLK_HD explicit LabelCut(const ShiftLabelsParams& p) : zigzag(p.zigzag && p.cp_size > 1) {
    first = zigzag ? 0 : p.cp_rank * (p.num_tokens / p.cp_size);
    step = zigzag ? p.cp_size : 1;
  }
  RLK_HD std::int64_t searched(std::int64_t local) const { return first + step * local; }
};
// The packed token whose id is the label of the rank's token `local`, or -1 if this token has no label. The sequence
// [begin, begin + length) holds cut.searched(local).
RLK_HD std::int64_t label_source(const ShiftLabelsParams& p, const LabelCut& cut, std::int64_t local,
                                 std::int64_t begin, std::int64_t length) {
  std::int64_t t = cut.searched(local);
  if (cut.zigzag) {
    const std::int64_t parts = p.cp_size, chunk = quotient(length, 2 * parts), before = quotient(begin, 2 * parts);
    if (2 * parts * before != begin || 2 * parts * chunk != length) return -1;
    const std::int64_t at = local - 2 * before;
    const bool second = at >= chunk;
    t = begin + (second ? 2 * parts - 1 - p.cp_rank : p.cp_rank) * chunk + (second ? at - chunk : at);
  }
  return t + 1 < begin + length ? t + 1 : -1;
}

template <class Memory>
RLK_HD void write_label(const ShiftLabelsParams& p, std::int64_t local) {
  const LabelCut cut(p);
  const std::int64_t searched = cut.searched(local);
  const std::int64_t sequence = sequence_of<Memory>(p.cu_seqlens, {0, p.num_sequences}, p.num_tokens, searched);
  std::int64_t from = -1;
  if (sequence >= 0) {
    const Span span = span_of<Memory>(p.cu_seqlens, p.num_tokens, sequence);
    from = label_source(p, cut, local, span.begin, span.length);
  }
  std::int64_t label = p.ignore_index;
  if (from >= 0 && counts<Memory>(p.mask, from)) label = integer_at<Memory>(p.ids, p.dtype, from);
  if (p.dtype == DType::kInt64) {
    Memory::global(static_cast<std::int64_t*>(p.labels))[local] = label;
  } else {
    Memory::global(static_cast<std::int32_t*>(p.labels))[local] = static_cast<std::int32_t>(label);
  }
}

// The work of one GPU block: a tile of local tokens. `shared` is an array of two numbers in shared memory.
template <class Memory, class Barrier>
RLK_HD void shift_labels_block(const ShiftLabelsParams& p, std::int64_t block, int thread, std::int64_t* shared,
                               const Barrier& barrier) {
  const LabelCut cut(p);
  const std::int64_t num = p.num_tokens / p.cp_size, first = block * kTokenTile;
  const std::int64_t last = first + (num - first < kTokenTile ? num - first : kTokenTile) - 1;
  const SequenceRange range = range_of_tile<Memory>(p.cu_seqlens, p.num_sequences, cut.searched(first),
                                                    cut.searched(last), thread, shared, barrier);
  std::int64_t from[kTileTokens], begin[kTileTokens], length[kTileTokens];
  std::int32_t sequence[kTileTokens];
  RLK_UNROLL
  for (int k = 0; k < kTileTokens; ++k) from[k] = cut.searched(first + k * kTileThreads + thread);
  sequences_of<Memory>(p.cu_seqlens, range, p.num_tokens, from, begin, length, sequence);
  RLK_UNROLL
  for (int k = 0; k < kTileTokens; ++k) {
    const std::int64_t local = first + k * kTileThreads + thread;
    from[k] = sequence[k] < 0 || local > last ? -1 : label_source(p, cut, local, begin[k], length[k]);
  }
  with_flag_bytes(p.mask, [&](auto bytes) {
    const FlagsFrom<decltype(bytes)::value, Memory> flags(p.mask, 0);
    typename decltype(flags)::Flag flag[kTileTokens];
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) {
      flag[k] = 0;
      if (from[k] >= 0) flag[k] = flags.load(from[k]);
    }
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) from[k] = flags.counts(flag[k]) ? from[k] : -1;
  });
  const auto write = [&](const auto* all_ids, auto* all_labels) {
    using Id = std::remove_pointer_t<decltype(all_labels)>;
    const auto* ids = Memory::global(all_ids);
    auto* labels = Memory::global(all_labels) + first + thread;
    Id label[kTileTokens];
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) {
      label[k] = static_cast<Id>(p.ignore_index);
      if (from[k] >= 0) label[k] = ids[from[k]];
    }
    RLK_UNROLL
    for (int k = 0; k < kTileTokens; ++k) {
      if (first + k * kTileThreads + thread <= last) labels[k * kTileThreads] = label[k];
    }
  };
  if (p.dtype == DType::kInt64) {
    write(static_cast<const std::int64_t*>(p.ids), static_cast<std::int64_t*>(p.labels));
  } else {
    write(static_cast<const std::int32_t*>(p.ids), static_cast<std::int32_t*>(p.labels));
  }
}

// `index` is the token's index in the mask. In padded rows the index is sequence * num_tokens + position. In packed
// arrays `range` contains the token's sequence.
template <class Memory>
RLK_HD void write_span_flag(const SpanMaskParams& p, const SequenceRange& range, std::int64_t index) {
  std::int64_t sequence, position;
  if (p.cu_seqlens.data == nullptr) {
    sequence = index / p.num_tokens;
    position = index - sequence * p.num_tokens;
  } else {
    sequence = sequence_of<Memory>(p.cu_seqlens, range, p.num_tokens, index);
    position = sequence < 0 ? 0 : index - span_of<Memory>(p.cu_seqlens, p.num_tokens, sequence).begin;
  }
  bool kept = false;
  if (sequence >= 0) {
    const Span spans = span_of<Memory>(p.span_offsets, p.num_spans, sequence);
    for (std::int64_t s = spans.begin; s < spans.begin + spans.length && !kept; ++s) {
      kept = integer_at<Memory>(p.spans, p.dtype, 2 * s) <= position &&
             position < integer_at<Memory>(p.spans, p.dtype, 2 * s + 1);
    }
  }
  Memory::global(p.mask)[index] = kept ? 1 : 0;
}

// The work of one GPU block: a tile of the mask.
template <class Memory, class Barrier>
RLK_HD void span_mask_block(const SpanMaskParams& p, std::int64_t block, int thread, std::int64_t* shared,
                            const Barrier& barrier) {
  const bool packed = p.cu_seqlens.data != nullptr;
  const std::int64_t num = packed ? p.num_tokens : p.num_sequences * p.num_tokens, first = block * kTokenTile;
  const std::int64_t last = first + (num - first < kTokenTile ? num - first : kTokenTile) - 1;
  SequenceRange range;
  if (packed) range = range_of_tile<Memory>(p.cu_seqlens, p.num_sequences, first, last, thread, shared, barrier);
  for (std::int64_t i = first + thread; i <= last; i += kTileThreads) write_span_flag<Memory>(p, range, i);
}

// Whether a marker ends at position `at` of the sequence whose ids begin at `first`.
template <class Memory>
RLK_HD bool ends_at(const ToolMaskParams& p, const Marker& m, std::int64_t first, std::int64_t at) {
  if (at + 1 < m.length) return false;
  for (int k = 0; k < m.length; ++k) {
    if (integer_at<Memory>(p.ids, p.dtype, first + at + 1 - m.length + k) != m.ids[k]) return false;
  }
  return true;
}
// The number of the event at a position, or 0 if no turn opens or closes there. Later positions have larger numbers. An
// opening has an odd number, and a closing an even number.
template <class Memory>
RLK_HD std::int64_t turn_event(const ToolMaskParams& p, std::int64_t first, std::int64_t at) {
  if (ends_at<Memory>(p, p.begin, first, at)) return 2 * (at + 1) + 1;
  return ends_at<Memory>(p, p.end, first, at) ? 2 * (at + 1) : 0;
}
// Whether a position in an open turn belongs to what the model wrote. The closing marker belongs to the model's text
// only with include_end.
template <class Memory>
RLK_HD bool turn_goes_on(const ToolMaskParams& p, std::int64_t first, std::int64_t length, std::int64_t at) {
  for (int k = 0; k < p.end.length && !p.include_end; ++k) {
    if (at + k < length && ends_at<Memory>(p, p.end, first, at + k)) return false;
  }
  return true;
}
// `before` is the number of the last event before the position.
template <class Memory>
RLK_HD bool turn_flag(const ToolMaskParams& p, std::int64_t before, std::int64_t first, std::int64_t length,
                      std::int64_t at) {
  return (before & 1) != 0 && turn_goes_on<Memory>(p, first, length, at);
}

// A block of a GPU processes one sequence, one tile of positions at a time. `events` is an array of 2 * kTurnThreads
// numbers in shared memory.
constexpr int kTurnThreads = 256;
template <class Memory, class Barrier>
RLK_HD void tool_mask_block(const ToolMaskParams& p, std::int64_t sequence, int thread, std::int64_t* events,
                            const Barrier& barrier) {
  const bool packed = p.cu_seqlens.data != nullptr;
  const Span span = span_of<Memory>(p.cu_seqlens, p.num_tokens, sequence);
  const std::int64_t first = packed ? span.begin : sequence * p.ids_stride;
  std::uint8_t* mask = Memory::global(p.mask) + (packed ? span.begin : sequence * p.num_tokens);
  std::int64_t carried = 0;
  for (std::int64_t tile = 0; tile < span.length; tile += kTurnThreads) {
    const std::int64_t at = tile + thread;
    events[thread] = at < span.length ? turn_event<Memory>(p, first, at) : 0;
    barrier();
    int from = 0;
    for (int distance = 1; distance < kTurnThreads; distance *= 2, from ^= kTurnThreads) {
      const std::int64_t mine = events[from + thread],
                         other = thread >= distance ? events[from + thread - distance] : 0;
      events[(from ^ kTurnThreads) + thread] = mine > other ? mine : other;
      barrier();
    }
    const std::int64_t inside = thread == 0 ? 0 : events[from + thread - 1];
    const std::int64_t last = events[from + kTurnThreads - 1];
    if (at < span.length) {
      mask[at] = turn_flag<Memory>(p, inside > carried ? inside : carried, first, span.length, at) ? 1 : 0;
    }
    carried = last > carried ? last : carried;
    barrier();
  }
}
// The end of the last sequence. Packed tokens from this index on belong to no sequence.
template <class Memory>
RLK_HD std::int64_t tokens_used(const Offsets& o, std::int64_t num_sequences, std::int64_t num_tokens) {
  const std::int64_t end = offset_at<Memory>(o, num_sequences);
  return end < 0 ? 0 : end < num_tokens ? end : num_tokens;
}

inline void check_tokens(std::int64_t num_sequences, std::int64_t num_tokens, DType dtype) {
  RLK_CHECK(num_sequences >= 0 && num_sequences < std::int64_t{1} << 31, "fewer than 2^31 sequences");
  RLK_CHECK(num_tokens >= 0 && num_tokens < std::int64_t{1} << 38, "fewer than 2^38 tokens");
  RLK_CHECK(dtype == DType::kInt32 || dtype == DType::kInt64, "ids are int32 or int64");
}
inline void check_shift_labels(const ShiftLabelsParams& p) {
  check_tokens(p.num_sequences, p.num_tokens, p.dtype);
  check_mask(p.mask);
  check_offsets(p.cu_seqlens);
  RLK_CHECK(p.cu_seqlens.data != nullptr, "shift_labels_packed: cu_seqlens is given");
  RLK_CHECK(p.cp_size >= 1 && p.cp_rank >= 0 && p.cp_rank < p.cp_size,
            "shift_labels_packed: cp_rank is in [0, cp_size)");
  RLK_CHECK(p.num_tokens % p.cp_size == 0, "shift_labels_packed: num_tokens is a multiple of cp_size");
}
inline void check_span_mask(const SpanMaskParams& p) {
  check_tokens(p.num_sequences, p.num_tokens, p.dtype);
  check_offsets(p.cu_seqlens);
  check_offsets(p.span_offsets);
  RLK_CHECK(p.span_offsets.data != nullptr, "loss_mask_from_spans: span_offsets is given");
}
inline void check_tool_mask(const ToolMaskParams& p) {
  check_tokens(p.num_sequences, p.num_tokens, p.dtype);
  check_offsets(p.cu_seqlens);
  for (const Marker* m : {&p.begin, &p.end}) {
    RLK_CHECK(m->length >= 1 && m->length <= kMarkerIds, "tool_mask: markers of 1 to 16 ids");
  }
}

}  // namespace rlk
