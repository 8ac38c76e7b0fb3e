// Checks spans of sequences. Invalid spans are an error on the CPU, which can read the spans before it writes anything.
#pragma once

#include <string>

#include "rlk/tokens.h"

namespace rlk::cpu {

// `spans` is [num_spans, 2]; sequence s has spans [span_offsets[s], span_offsets[s + 1]). length_of(s) gives the length
//   of sequence s.
template <class LengthOf>
void check_spans(const Offsets& spans, const Offsets& span_offsets, std::int64_t num_spans, std::int64_t num_sequences,
                 const LengthOf& length_of) {
  check_offset_values(span_offsets, num_sequences, num_spans, "span_offsets", "the number of spans", true);
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    const Span of = span_of(span_offsets, num_spans, i);
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
