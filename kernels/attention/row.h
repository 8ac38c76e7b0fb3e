// For every backend: the reference that scales a row's probabilities, and the steps from a row's sums to its output.
#pragma once

#include "rlk/math/softmax_stats.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/attention.h"

namespace rlk {

RLK_HD float attention_scale(float softmax_scale) { return mul_rn(kLog2e, softmax_scale); }
// c, the factor of the exponents in the contract of ops/attention.h.
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
  // h of a product of q and k, the score of h, and the factor of ds (the softcap's derivative).
  RLK_HD float h(float product) const { return tanh(mul_rn(product, inner)); }
  RLK_HD float score(float h) const { return mul_rn(cap, h); }
  static RLK_HD float slope(float h) { return fma_rn(-h, h, 1.0f); }
};

// f(a - b) of the contract for two references a <= b. The result is 2^(a - b), or 0 if 2^(a - b) is below 2^-126.
RLK_HD float attention_factor(float a, float b) {
  const float e = sub_rn(a, b);
  return e >= -126.0f ? float_of((static_cast<std::int32_t>(e) + 127) << 23) : 0.0f;
}

// The reference of a row over the blocks of a split so far. While no block has contributed, m is -Inf. If a score was
// NaN, or if the reference reaches the contract's limit of 2^21, m is NaN.
struct AttentionReference {
  float largest = -infinity();  // largest score
  float m = -infinity();
  float q = 0.0f;  // lower clamp of scores, for the portable exponential

  RLK_HD bool contributes() const { return m > -infinity(); }

  // Updates the reference by a block's largest score, which is NaN if any score is NaN. Returns the factor that the
  // sums so far must be multiplied by. kClamps also computes q, which only the portable exponential needs.
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

// Merges sums of the earlier splits, whose reference is `before`, with sums of the next split, whose reference is
// `m_of_split`. If one operand contributed nothing, the result is the other operand, unchanged.
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
// `inverse` is fl(1 / l). A row needs one division for it.
RLK_HD float attention_output(float sum, float inverse) { return add_rn(mul_rn(sum, inverse), 0.0f); }
RLK_HD float attention_lse(float m, float l) { return mul_rn(kLn2, add_rn(m, log2(l))); }

}  // namespace rlk
