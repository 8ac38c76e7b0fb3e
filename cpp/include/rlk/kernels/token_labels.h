// Labels and masks of single tokens, for the CPU, CUDA and HIP.
#pragma once

#include "rlk/ops/shift_labels_packed.h"

namespace rlk {

template <class Memory>
RLK_HD std::int64_t integer_at(const void* data, DType dtype, std::int64_t i) {
  if (dtype == DType::kInt64) return Memory::global(static_cast<const std::int64_t*>(data))[i];
  return Memory::global(static_cast<const std::int32_t*>(data))[i];
}

template <class Memory>
RLK_HD std::int64_t label_of(const ShiftLabelsParams& p, std::int64_t local) {
  const bool zigzag = p.zigzag && p.cp_size > 1;
  const std::int64_t parts = p.cp_size, t_of_cut = p.cp_rank * (p.num_tokens / parts) + local;
  const std::int64_t searched = zigzag ? local * parts : t_of_cut;
  const std::int64_t sequence = sequence_of<Memory>(p.cu_seqlens, p.num_sequences, p.num_tokens, searched);
  if (sequence < 0) return p.ignore_index;
  const Span span = span_of<Memory>(p.cu_seqlens, p.num_tokens, sequence);
  std::int64_t t = t_of_cut;
  if (zigzag) {
    if (span.begin % (2 * parts) != 0 || span.length % (2 * parts) != 0) return p.ignore_index;
    const std::int64_t chunk = span.length / (2 * parts), at = local - span.begin / parts;
    const bool second = at >= chunk;
    t = span.begin + (second ? 2 * parts - 1 - p.cp_rank : p.cp_rank) * chunk + (second ? at - chunk : at);
  }
  if (t + 1 >= span.begin + span.length || !counts<Memory>(p.mask, t + 1)) return p.ignore_index;
  return integer_at<Memory>(p.ids, p.dtype, t + 1);
}
template <class Memory>
RLK_HD void write_label(const ShiftLabelsParams& p, std::int64_t local) {
  const std::int64_t label = label_of<Memory>(p, local);
  if (p.dtype == DType::kInt64) {
    Memory::global(static_cast<std::int64_t*>(p.labels))[local] = label;
  } else {
    Memory::global(static_cast<std::int32_t*>(p.labels))[local] = static_cast<std::int32_t>(label);
  }
}

// `index` of the mask: of padded rows sequence * num_tokens + position.
template <class Memory>
RLK_HD void write_span_flag(const SpanMaskParams& p, std::int64_t index) {
  std::int64_t sequence, position;
  if (p.cu_seqlens.data == nullptr) {
    sequence = index / p.num_tokens;
    position = index - sequence * p.num_tokens;
  } else {
    sequence = sequence_of<Memory>(p.cu_seqlens, p.num_sequences, p.num_tokens, index);
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

// Whether a marker's last id is at position `at` of a sequence whose ids begin at `first`.
template <class Memory>
RLK_HD bool ends_at(const ToolMaskParams& p, const Marker& m, std::int64_t first, std::int64_t at) {
  if (at + 1 < m.length) return false;
  for (int k = 0; k < m.length; ++k) {
    if (integer_at<Memory>(p.ids, p.dtype, first + at + 1 - m.length + k) != m.ids[k]) return false;
  }
  return true;
}
// 0 where nothing happens at a position; else larger for later ones, odd for an opening.
template <class Memory>
RLK_HD std::int64_t turn_event(const ToolMaskParams& p, std::int64_t first, std::int64_t at) {
  if (ends_at<Memory>(p, p.begin, first, at)) return 2 * (at + 1) + 1;
  return ends_at<Memory>(p, p.end, first, at) ? 2 * (at + 1) : 0;
}
// `before`: the largest event before the position.
template <class Memory>
RLK_HD bool turn_flag(const ToolMaskParams& p, std::int64_t before, std::int64_t first, std::int64_t length,
                      std::int64_t at) {
  if ((before & 1) == 0) return false;
  for (int k = 0; k < p.end.length && !p.include_end; ++k) {
    if (at + k < length && ends_at<Memory>(p, p.end, first, at + k)) return false;
  }
  return true;
}

// A block of a GPU has a sequence, a tile of positions at a time. `events`: [2 * kTurnThreads] that the block shares.
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
// Packed tokens from here on belong to no sequence.
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
