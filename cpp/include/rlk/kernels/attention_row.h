// The reference that a row's probabilities are measured against, and what becomes of its sums. For every backend.
#pragma once

#include "rlk/math/softmax_stats.h"
#include "rlk/ops/attention.h"

namespace rlk {

RLK_HD float attention_scale(float softmax_scale) { return mul_rn(kLog2e, softmax_scale); }

// Of a split, over the blocks so far. m is -Inf where they contributed nothing, NaN where the row has failed.
struct AttentionReference {
  float largest = -infinity();  // score
  float m = -infinity();
  float q = 0.0f;  // lower clamp of scores, portable

  RLK_HD bool contributes() const { return m > -infinity(); }

  // Takes in a block's largest score, NaN if any is. Gives the power of two, at most 0, that the sums so far take.
  RLK_HD std::int32_t raise(float c, float block_largest) {
    if (!(block_largest > largest) && !is_nan(block_largest)) return 0;
    largest = block_largest;
    SoftmaxStats failed;
    const LeafReference r = leaf_reference(c, largest, &failed);
    if (!r.usable) {
      if (is_nan(failed.m)) m = canonical_nan();
      return 0;
    }
    const float before = m;
    if (is_nan(before)) return 0;
    m = r.m;
    q = r.q;
    return before > -infinity() ? steps_between(before, m) : 0;
  }

  // m_a - m_b, at most 0; -600 is past what fp32 spans.
  static RLK_HD std::int32_t steps_between(float a, float b) {
    const float gap = sub_rn(a, b);
    return static_cast<std::int32_t>(gap > -600.0f ? gap : -600.0f);
  }
};

// How the sums of the splits so far, at m, and those of another, at `m_of_split`, come together: both scaled, then added.
// Where one of them contributed nothing the other is unchanged.
struct AttentionMerge {
  float m;
  std::int32_t steps, steps_of_split;
  bool only_split, only_before;

  RLK_HD AttentionMerge(float before, float m_of_split)
      : m(before), steps(0), steps_of_split(0), only_split(before == -infinity()), only_before(false) {
    if (only_split) {
      m = m_of_split;
      return;
    }
    only_before = m_of_split == -infinity();
    if (only_before) return;
    if (is_nan(before) || is_nan(m_of_split)) {
      m = canonical_nan();
      return;
    }
    m = before > m_of_split ? before : m_of_split;
    steps = AttentionReference::steps_between(before, m);
    steps_of_split = AttentionReference::steps_between(m_of_split, m);
  }
  RLK_HD float operator()(float before, float of_split) const {
    if (only_split) return of_split;
    if (only_before) return before;
    return add_rn(scale_down(before, steps), scale_down(of_split, steps_of_split));
  }
};

// 1 / l is not taken: out is a quotient. `sees`: whether the row sees any key.
RLK_HD bool attention_fails(float m, bool sees) { return sees && !(m > -infinity()); }
RLK_HD float attention_output(float sum, float l) { return add_rn(div_rn(sum, l), 0.0f); }
RLK_HD float attention_lse(float m, float l) { return mul_rn(kLn2, add_rn(m, log2(l))); }

}  // namespace rlk
