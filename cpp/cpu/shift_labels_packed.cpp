// CPU backend of labels and masks: tokens, or sequences, are spread over threads.
#include "shift_labels_packed.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "rlk/kernels/token_labels.h"
#include "span_check.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskTokens = 4096;  // below these a thread's wake-up costs more than its help

template <class F>
void for_tokens(std::int64_t num, const F& f) {
  parallel_for(num, kTaskTokens, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) f(i);
  });
}

}  // namespace

void shift_labels_packed(const ShiftLabelsParams& p) {
  check_shift_labels(p);
  check_offset_values(p.cu_seqlens, p.num_sequences, p.num_tokens);
  for (std::int64_t i = 0; i <= p.num_sequences && p.zigzag && p.cp_size > 1; ++i) {
    const std::int64_t offset = offset_at(p.cu_seqlens, i);
    if (offset % (2 * p.cp_size) == 0) continue;
    throw InvalidArgument("cu_seqlens: expected multiples of " + std::to_string(2 * p.cp_size) +
                          " (2 * cp_size, for zigzag), got " + std::to_string(offset) + " at " + std::to_string(i) +
                          "; pad the sequences");
  }
  for_tokens(p.num_tokens / p.cp_size, [&](std::int64_t i) { write_label<PlainMemory>(p, i); });
}

void loss_mask_from_spans(const SpanMaskParams& p) {
  check_span_mask(p);
  check_offset_values(p.cu_seqlens, p.num_sequences, p.num_tokens);
  check_spans({p.spans, p.dtype}, p.span_offsets, p.num_spans, p.num_sequences,
              [&](std::int64_t i) { return span_of(p.cu_seqlens, p.num_tokens, i).length; });
  const std::int64_t items = p.cu_seqlens.data != nullptr ? p.num_tokens : p.num_sequences * p.num_tokens;
  for_tokens(items, [&](std::int64_t i) { write_span_flag<PlainMemory>(p, {0, p.num_sequences}, i); });
}

void tool_mask(const ToolMaskParams& p) {
  check_tool_mask(p);
  check_offset_values(p.cu_seqlens, p.num_sequences, p.num_tokens);
  const bool packed = p.cu_seqlens.data != nullptr;
  parallel_for(p.num_sequences, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Span span = span_of(p.cu_seqlens, p.num_tokens, i);
      const std::int64_t first = packed ? span.begin : i * p.ids_stride;
      std::uint8_t* mask = p.mask + (packed ? span.begin : i * p.num_tokens);
      std::int64_t before = 0;
      for (std::int64_t at = 0; at < span.length; ++at) {
        mask[at] = turn_flag<PlainMemory>(p, before, first, span.length, at);
        before = std::max(before, turn_event<PlainMemory>(p, first, at));
      }
    }
  });
  if (!packed) return;
  const std::int64_t used = tokens_used<PlainMemory>(p.cu_seqlens, p.num_sequences, p.num_tokens);
  std::fill(p.mask + used, p.mask + p.num_tokens, std::uint8_t{0});
}

}  // namespace rlk::cpu
