// Formulas of attention for one row, for every backend. A row's probabilities are scaled by 2^-m. The reference m is
// the largest scaled score so far, rounded up to an integer. The file has the reference, the merge of splits, and the
// steps from a row's sums to its output.
#pragma once

#include "rlk/math/softmax_stats.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/attention.h"

namespace rlk {

RLK_HD float attention_scale(float softmax_scale) { return mul_rn(kLog2e, softmax_scale); }
// The number c, by which scores are multiplied before exp2, in the contract of ops/attention.h.
RLK_HD float attention_scale(const AttentionInput& p) {
  return p.softcap > 0.0f ? kLog2e : attention_scale(p.softmax_scale);
}

// The softcap of a call's scores, if any.
struct AttentionSoftcap {
  float cap;    // 0: none
  float inner;  // fl(softmax_scale / softcap)

  RLK_HD explicit AttentionSoftcap(const AttentionInput& p)
      : cap(p.softcap), inner(p.softcap > 0.0f ? div_rn(p.softmax_scale, p.softcap) : 0.0f) {}
  RLK_HD explicit operator bool() const { return cap > 0.0f; }
  // h(product) is the tanh for a product of q and k. score(h) is the score. slope(h) is the softcap's derivative, a
  // factor of the gradient ds.
  RLK_HD float h(float product) const { return tanh(mul_rn(product, inner)); }
  RLK_HD float score(float h) const { return mul_rn(cap, h); }
  static RLK_HD float slope(float h) { return fma_rn(-h, h, 1.0f); }
};

// The factor from the scale of reference a to the scale of reference b, where a <= b are integers. The result is
// 2^(a - b), or 0 if 2^(a - b) is below 2^-126.
RLK_HD float attention_factor(float a, float b) {
  const float e = sub_rn(a, b);
  return e >= -126.0f ? float_of((static_cast<std::int32_t>(e) + 127) << 23) : 0.0f;
}

// The reference of a row over the blocks of a split so far. m is -Inf if no score so far contributes. After a NaN
// score, m is NaN. m is also NaN if the reference reaches the contract's limit of 2^21.
struct AttentionReference {
  float largest = -infinity();  // largest score
  float m = -infinity();
  float q = 0.0f;  // lower bound to which the portable exponential clamps scores

  RLK_HD bool contributes() const { return m > -infinity(); }

  // Updates the reference by a block's largest score, which is NaN if any score is NaN. Returns the factor for the sums
  // so far, which have the scale of the old reference. kClamps: also computes q, which only the portable exponential
  // needs.
  template <bool kClamps = true>
  RLK_HD float raise(float c, float block_largest) {
    if (!(block_largest > largest) && !is_nan(block_largest)) return 1.0f;
    largest = block_largest;
    SoftmaxStats failed;
    const LeafReference r = leaf_reference(c, largest, &failed);
    if (!r.usable) {
      if (is_nan(failed.m)) m = canonical_nan();
      return 1.0f;
    }
    const float before = m;
    if (is_nan(before)) return 1.0f;
    m = r.m;
    if (kClamps) q = r.q;
    return before > -infinity() ? attention_factor(before, m) : 1.0f;
  }
};

// Merges the sums of earlier splits, which have the reference `before`, with the sums of the next split, which have the
// reference `m_of_split`. If one side contributed nothing (its reference is -Inf), the result is the other side,
// unchanged.
struct AttentionMerge {
  float m;
  float factor, factor_of_split;
  bool only_split, only_before;

  RLK_HD AttentionMerge(float before, float m_of_split)
      : m(before), factor(1.0f), factor_of_split(1.0f), only_split(before == -infinity()), only_before(false) {
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
    factor = attention_factor(before, m);
    factor_of_split = attention_factor(m_of_split, m);
  }
  RLK_HD float operator()(float before, float of_split) const {
    if (only_split) return of_split;
    if (only_before) return before;
    return fma_rn(before, factor, mul_rn(of_split, factor_of_split));
  }
};

// `sees` tells whether the row sees any key.
RLK_HD bool attention_fails(float m, bool sees) { return sees && !(m > -infinity()); }
// `inverse` is fl(1 / l), where l is the row's sum of probabilities. All columns of a row share this division.
RLK_HD float attention_output(float sum, float inverse) { return add_rn(mul_rn(sum, inverse), 0.0f); }
RLK_HD float attention_lse(float m, float l) { return mul_rn(kLn2, add_rn(m, log2(l))); }

}  // namespace rlk
