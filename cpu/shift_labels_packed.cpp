// CPU backend of the operators that make labels and masks: spreads the tokens of labels, and the sequences of masks,
// over threads.
#include "rlk/ops/shift_labels_packed.h"

#include <algorithm>
#include <string>

#include "kernels/tokens/labels.h"
#include "rlk/backends.h"
#include "span_check.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

constexpr std::int64_t kTaskTokens = 8192;  // enough tokens to be worth waking a thread; their 64 KB stay in a cache

// Labels of neighbouring tokens come from neighbouring ids, so they are copied in runs.
template <class Id, int kFlagBytes>
class Labels {
 public:
  explicit Labels(const ShiftLabelsParams& p)
      : p_(p),
        cut_(p),
        flags_(p.mask, 0),
        ids_(static_cast<const Id*>(p.ids)),
        labels_(static_cast<Id*>(p.labels)),
        none_(static_cast<Id>(p.ignore_index)) {}

  // Writes local tokens [first, last).
  void write(std::int64_t first, std::int64_t last) const {
    while (first < last) {
      const std::int64_t sequence =
          sequence_of(p_.cu_seqlens, {0, p_.num_sequences}, p_.num_tokens, cut_.searched(first));
      if (sequence < 0) return std::fill(labels_ + first, labels_ + last, none_);  // tokens after the last sequence
      first = write_run(span_of(p_.cu_seqlens, p_.num_tokens, sequence), first, last);
    }
  }

 private:
  // Writes labels from `first` on, as long as their sources are neighbours. Returns the end of this run.
  std::int64_t write_run(const Span& span, std::int64_t first, std::int64_t last) const {
    std::int64_t t = cut_.searched(first), end = span.begin + span.length - cut_.first;
    if (cut_.zigzag) {
      const std::int64_t parts = p_.cp_size, chunk = span.length / (2 * parts), begin = span.begin / parts;
      const bool second = first - begin >= chunk;
      t = span.begin + (second ? 2 * parts - 1 - p_.cp_rank : p_.cp_rank) * chunk + first - begin -
          (second ? chunk : 0);
      end = begin + (second ? 2 : 1) * chunk;
    }
    end = std::min(end, last);
    const bool ends = t + (end - first) == span.begin + span.length;
    const std::int64_t count = end - first - (ends ? 1 : 0);
    const Id* const from = ids_ + t + 1;
    Id* const to = labels_ + first;
    if constexpr (kFlagBytes == 0) {
      std::copy_n(from, count, to);
    } else {
      for (std::int64_t k = 0; k < count; ++k) to[k] = flags_.counts(flags_.load(t + 1 + k)) ? from[k] : none_;
    }
    if (ends) to[count] = none_;
    return end;
  }

  const ShiftLabelsParams& p_;
  LabelCut cut_;
  FlagsFrom<kFlagBytes, PlainMemory> flags_;
  const Id* ids_;
  Id* labels_;
  Id none_;
};
template <class Id>
void write_labels(const ShiftLabelsParams& p) {
  with_flag_bytes(p.mask, [&](auto bytes) {
    const Labels<Id, decltype(bytes)::value> labels(p);
    parallel_for(p.num_tokens / p.cp_size, kTaskTokens,
                 [&](std::int64_t begin, std::int64_t end) { labels.write(begin, end); });
  });
}

// Clears the mask of packed tokens outside every sequence.
template <class Params>
void clear_spare(const Params& p) {
  const std::int64_t used = tokens_used<PlainMemory>(p.cu_seqlens, p.num_sequences, p.num_tokens);
  std::fill(p.mask + used, p.mask + p.num_tokens, std::uint8_t{0});
}

// Writes the spans of a sequence or row, whose mask begins at `mask`.
void write_spans(const SpanMaskParams& p, std::int64_t sequence, std::int64_t length, std::uint8_t* mask) {
  std::fill(mask, mask + length, std::uint8_t{0});
  const Span of = span_of(p.span_offsets, p.num_spans, sequence);
  for (std::int64_t s = of.begin; s < of.begin + of.length; ++s) {
    std::fill(mask + integer_at<PlainMemory>(p.spans, p.dtype, 2 * s),
              mask + integer_at<PlainMemory>(p.spans, p.dtype, 2 * s + 1), std::uint8_t{1});
  }
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
  p.dtype == DType::kInt64 ? write_labels<std::int64_t>(p) : write_labels<std::int32_t>(p);
}

void loss_mask_from_spans(const SpanMaskParams& p) {
  check_span_mask(p);
  check_offset_values(p.cu_seqlens, p.num_sequences, p.num_tokens);
  check_spans({p.spans, p.dtype}, p.span_offsets, p.num_spans, p.num_sequences,
              [&](std::int64_t i) { return span_of(p.cu_seqlens, p.num_tokens, i).length; });
  const bool packed = p.cu_seqlens.data != nullptr;
  const std::int64_t length = packed ? p.num_tokens / std::max<std::int64_t>(p.num_sequences, 1) : p.num_tokens;
  parallel_for(p.num_sequences, std::max<std::int64_t>(kTaskTokens / (length + 1), 1),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t i = begin; i < end; ++i) {
                   const Span span = span_of(p.cu_seqlens, p.num_tokens, i);
                   write_spans(p, i, span.length, p.mask + (packed ? span.begin : i * p.num_tokens));
                 }
               });
  if (packed) clear_spare(p);
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
  if (packed) clear_spare(p);
}

}  // namespace rlk::cpu
