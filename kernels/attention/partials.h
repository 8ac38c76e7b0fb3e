// Partials of attention, for every backend. A split is 1,024 or more consecutive keys; only a sequence's last split may
// have fewer. A partial is what a row computes over one split: the reference m (row.h), the sum of probabilities l, and
// the sums of values. This file also tells where partials are stored.
#pragma once

#include "kernels/attention/row.h"
#include "kernels/attention/sinks.h"
#include "kernels/attention/span.h"

namespace rlk {

// m and l of a row's partial. The split holds at least one key that the row sees.
struct AttentionPartial {
  float m, l;

  // The arguments are m and l after the split's last key.
  RLK_HD AttentionPartial(float m_of_split, float l_of_split)
      : m(is_nan(m_of_split) ? canonical_nan() : m_of_split),
        l(m > -infinity() ? l_of_split
          : is_nan(m)     ? 0.0f
                          : 1.0f) {}
  // Returns the sum of values that a partial stores for a column, given the sum over the split.
  RLK_HD float sum(float of_split) const {
    if (!(m > -infinity())) return 0.0f;
    return is_nan(of_split) ? canonical_nan() : add_rn(of_split, 0.0f);
  }
};
// Whether a row with this partial sees a key of the split.
RLK_HD bool attention_partial_sees(float m, float l) { return m != -infinity() || l != 0.0f; }
// Whether a merged row is NaN. Partials may hold an m at the contract's limit of 2^21, which no split kernel stores.
RLK_HD bool attention_merge_fails(float m, bool sees) { return attention_fails(m, sees) || m >= kStatsRange; }

// The range of keys in split `number` that a row sees.
RLK_HD AttentionRange attention_seen_of_split(const AttentionSpan& span, AttentionRange sees, std::int64_t number) {
  const std::int64_t first = attention_split_begin(number), last = attention_split_begin(number + 1);
  sees = span.here(sees);
  return {sees.first > first ? sees.first : first, sees.last < last ? sees.last : last};
}

// Index of the partial of split `number` for a row (a token in a head). A split has `rows` rows.
RLK_HD std::int64_t attention_partial_index(const AttentionInput& p, std::int64_t rows, std::int64_t number,
                                            std::int64_t row) {
  return (number - p.first_split) * rows + row;
}

// Writes partials that the split kernels leave out, because the row sees no key of the split. `index` is the thread's
// index, out of splits * rows * heads * (value_dim / 8) threads. A thread writes eight columns.
RLK_DEVICE void attention_partial_blank(const AttentionPartialsParams& p, std::int64_t index) {
  const std::int64_t vec8s = p.value_dim / 8, rows = attention_rows(p) * p.num_q_heads;
  const std::int64_t cell = index / vec8s, vec8 = index % vec8s, number = p.first_split + cell / rows;
  const AttentionQuery query(p, cell % rows / p.num_q_heads);
  const std::int64_t first = attention_split_begin(number), last = attention_split_begin(number + 1);
  if (query.used() && query.sees.first < last && query.sees.last > first) return;
  if (vec8 == 0) {
    in_memory(p.stats)[2 * cell] = -infinity();
    in_memory(p.stats)[2 * cell + 1] = 0.0f;
  }
  auto* to = in_memory(p.sums) + cell * p.value_dim + vec8 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = 0.0f;
}
inline std::int64_t attention_blank_threads(const AttentionPartialsParams& p) {
  return p.num_splits * attention_rows(p) * p.num_q_heads * (p.value_dim / 8);
}

}  // namespace rlk
