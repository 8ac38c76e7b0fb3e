// Spans of sequences that a kernel could not follow are an error on the CPU, where they can be read, before it writes anything.
#pragma once

#include <string>

#include "rlk/kernels/sequences.h"

namespace rlk::cpu {

// spans: [num_spans, 2], of sequence s those in [span_offsets[s], span_offsets[s + 1]); length_of(s): of sequence s.
template <class LengthOf>
void check_spans(const Offsets& spans, const Offsets& span_offsets, std::int64_t num_spans, std::int64_t num_sequences,
                 const LengthOf& length_of) {
  if (num_sequences == 0 && (offset_at(span_offsets, 0) != 0 || num_spans != 0)) {
    throw InvalidArgument("span_offsets: expected ascending offsets from 0 to " + std::to_string(num_spans) +
                          " (the spans), got " + std::to_string(offset_at(span_offsets, 0)) + " alone");
  }
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    const Span of = span_of(span_offsets, num_spans, i);
    if (!of.good || (i + 1 == num_sequences && of.begin + of.length != num_spans)) {
      throw InvalidArgument("span_offsets: expected ascending offsets from 0 to " + std::to_string(num_spans) +
                            " (the spans), got " + std::to_string(offset_at(span_offsets, i)) + ", " +
                            std::to_string(offset_at(span_offsets, i + 1)) + " at " + std::to_string(i));
    }
    const std::int64_t length = length_of(i);
    for (std::int64_t s = of.begin; s < of.begin + of.length; ++s) {
      const std::int64_t begin = offset_at(spans, 2 * s), end = offset_at(spans, 2 * s + 1);
      if (begin >= 0 && begin <= end && end <= length) continue;
      throw InvalidArgument("spans: expected 0 <= begin <= end <= " + std::to_string(length) +
                            " (the length of sequence " + std::to_string(i) + "), got " + std::to_string(begin) + ", " +
                            std::to_string(end) + " for span " + std::to_string(s));
    }
  }
}

}  // namespace rlk::cpu
