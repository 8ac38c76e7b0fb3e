// Softmax statistics of a row of logits (docs/numerics.md, rules 4 and 5): those of a leaf (128 columns), their
// combination in a tree, and the outputs of the row.
//
// All values are in the log2 domain. A node is (m, S, E, Q) with an integer m, S = sum 2^(c z - m), E = sum 2^(c z - m)
// z and Q = sum 4^(c z - m). Rescaling by 2^(m_a - M) is exact. So the bits of a row depend on the tree alone, and the
// tree depends only on the column indices.
#pragma once

#include "rlk/base.h"
#include "rlk/math/exp2.h"
#include "rlk/math/ieee.h"
#include "rlk/math/log2.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/logprob.h"

namespace rlk {

constexpr float kStatsRange = 2097152.0f;   // 2^21: beyond this range fma(z, c, -m) has no accurate fraction bits
constexpr float kStatsFloor = 120.0f;       // in a leaf, a term 2^(c z - m) below 2^-120 counts as 2^-120
constexpr float kStatsShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits

struct SoftmaxStats {
  float m, S, E, Q;
};

RLK_HD SoftmaxStats identity_stats() { return {-infinity(), 0.0f, 0.0f, 0.0f}; }

// Statistics of a row that cannot have a result. m is NaN and S holds the status bits as a float, so both can be stored
// as plain fp32 fields.
RLK_HD SoftmaxStats failed_stats(std::int32_t status) {
  return {canonical_nan(), static_cast<float>(status), 0.0f, 0.0f};
}
RLK_HD std::int32_t status_of(const SoftmaxStats& s) { return is_nan(s.m) ? static_cast<std::int32_t>(s.S) : 0; }

// The scaled logit z of ops/logprob.h. An infinite logit marks a column, so a softcap leaves it unchanged.
RLK_HD float scaled_logit(float x, float logit_scale, float softcap, float inverse_softcap) {
  const float z = mul_rn(x, logit_scale);
  if (softcap == 0.0f || abs_of(z) == infinity()) return z;
  return mul_rn(softcap, tanh(mul_rn(z, inverse_softcap)));
}

// The number m that is subtracted from a leaf's scaled logits. If the leaf adds nothing or has failed, `usable` is
// false and `stats` is the leaf's result.
struct LeafReference {
  float m;
  float q;  // lower clamp of z
  bool usable;
};

// The lower clamp q of a leaf, from c and m. For moderate m, q is rounded toward -Inf to bf16, so that a kernel may
// clamp packed bf16 logits in their own format.
RLK_HD float leaf_clamp(float c, float m) {
  float q = div_rn(sub_rn(m, kStatsFloor), c);
  if (abs_of(m) <= 512.0f) {
    const std::int32_t bits = bits_of(q);
    const std::int32_t truncated = bits & static_cast<std::int32_t>(0xffff0000u);
    // Rounds toward -Inf. Truncation rounds q >= 0 toward -Inf; a negative q with lower bits set moves one bf16 step
    // away from zero.
    q = float_of(bits < 0 && truncated != bits ? truncated + 0x10000 : truncated);
  }
  return q;
}

// m and q of a leaf from c and the largest z of its columns (NaN if any is NaN).
RLK_HD LeafReference leaf_reference(float c, float max_z, SoftmaxStats* stats) {
  *stats = identity_stats();
  const float scaled = mul_rn(c, max_z);
  if (is_nan(max_z) || !(scaled < kStatsRange)) {
    *stats = failed_stats(is_nan(max_z) ? kNanLogit : kInfLogit);
    return {0.0f, 0.0f, false};
  }
  const float m = add_rn(ceil_of(scaled), 0.0f);  // + 0 turns -0 into +0
  if (m >= kStatsRange) {
    *stats = failed_stats(kInfLogit);
    return {0.0f, 0.0f, false};
  }
  if (m <= -kStatsRange) return {0.0f, 0.0f, false};
  return {m, leaf_clamp(c, m), true};
}

// 2^(z c - m) by the portable exponential. Callers clamp z to at least q, so the exponent stays in fp32's normal range.
template <class F>
RLK_HD F stat_exp_portable(F z, F c, F shift_minus_m) {
  const F t = fma_rn(z, c, shift_minus_m);  // shift_minus_m is kStatsShift - m
  const F n = sub_rn(t, shift_minus_m);     // round(z c), exact
  const F e = exp2_stat(fma_rn(z, c, -n));
  return float_of(bits_of(e) + (bits_of(t) << 23));
}

// 2^t for a backward, by the portable exponential. The result for a NaN is arbitrary.
struct PortableProbability {
  static RLK_HD float of(float t) {
    const float p = exp2_normal(t > 127.0f ? 127.0f : t);
    return t < -126.0f ? 0.0f : p;
  }
};

// x * 2^d for an integer d <= 0, exact; a result below 2^-126 is +0.
RLK_HD float scale_down(float x, std::int32_t d) {
  const std::int32_t bits = bits_of(x);
  const std::int32_t exponent = (bits >> 23) & 0xff;
  if (exponent == 0xff) return x;
  return exponent + d < 1 ? 0.0f : float_of(bits + d * (1 << 23));
}

// The parent of two neighbouring nodes of the tree; `a` has the lower index. combine() is commutative, and combining a
// node with identity_stats() does not change the node.
RLK_HD SoftmaxStats combine(const SoftmaxStats& a, const SoftmaxStats& b) {
  if (is_nan(a.m) || is_nan(b.m)) return failed_stats(status_of(a) | status_of(b));
  if (a.m == -infinity()) return b;
  if (b.m == -infinity()) return a;
  const float m = a.m > b.m ? a.m : b.m;
  // |m| < 2^21, so differences are exact. A gap below -600 is cut to -600, which fits an int. Both gaps scale every
  // value to +0, since they exceed fp32's range of exponents.
  const float least = -600.0f;
  const float gap_a = sub_rn(a.m, m), gap_b = sub_rn(b.m, m);
  const std::int32_t da = static_cast<std::int32_t>(gap_a > least ? gap_a : least);
  const std::int32_t db = static_cast<std::int32_t>(gap_b > least ? gap_b : least);
  return {m, add_rn(scale_down(a.S, da), scale_down(b.S, db)), add_rn(scale_down(a.E, da), scale_down(b.E, db)),
          add_rn(scale_down(a.Q, 2 * da), scale_down(b.Q, 2 * db))};
}

// Adds the sums of the eight chains of a leaf: ((0+1)+(2+3))+((4+5)+(6+7)). Chain r sums columns r, r + 8, ... of the
// leaf.
RLK_HD float combine_chains(const float* s) {
  return add_rn(add_rn(add_rn(s[0], s[1]), add_rn(s[2], s[3])), add_rn(add_rn(s[4], s[5]), add_rn(s[6], s[7])));
}

// Whether the temperature t is finite, positive and not subnormal, so that log2e / t is finite.
RLK_HD bool is_temperature(float t) { return t >= 0x1p-126f && t < infinity(); }

// c of rule 4, the factor of z in exponents: log2e / temperature.
RLK_HD float log2_scale(float temperature) { return div_rn(kLog2e, temperature); }

// Stores the statistics at the root of a tree as kStatsFields floats. Every NaN is canonical, and a zero E is +0.
// Otherwise the sign of an E that underflows would depend on the code path, and the bits of NaN on the hardware.
RLK_HD void store_stats(const SoftmaxStats& root, float target_z, float* stats) {
  const float fields[] = {root.m, root.S, root.E, root.Q, target_z};
  for (int i = 0; i < kStatsFields; ++i) {
    stats[i] = is_nan(fields[i]) ? canonical_nan() : i == 2 ? add_rn(fields[i], 0.0f) : fields[i];
  }
}

struct LogprobOutputs {
  float logprob, lse, entropy, sum_p_sq;
  std::int32_t status;
};

// negative_part and positive_part: x if x is below (negative_part) or above (positive_part) 0, else +0. The functions
// compare integers, since clang turns a float comparison with 0 into a minimum or maximum. The zero of such a minimum
// may have either sign, and clang removes a later + 0 that would make the zero positive.
RLK_HD float negative_part(float x) {
  const auto bits = static_cast<std::uint32_t>(bits_of(x));
  return bits > 0x80000000u && bits <= 0xff800000u ? x : 0.0f;
}
RLK_HD float positive_part(float x) {
  const std::int32_t bits = bits_of(x);
  return bits > 0 && bits <= 0x7f800000 ? x : 0.0f;
}

// Outputs of a row from its root. target_z: +Inf for an ignored row, NaN for a missing column, else the target's z.
RLK_HD LogprobOutputs logprob_outputs(const SoftmaxStats& root, float target_z, float temperature) {
  if (target_z == infinity() && root.m == -infinity()) return {0.0f, 0.0f, 0.0f, 0.0f, kOk};
  std::int32_t status = status_of(root);
  if (!is_temperature(temperature)) status |= kBadTemperature;
  if (root.m == -infinity()) status |= kEmptyRow;
  const float nan = canonical_nan();
  if (status != kOk) {
    // A NaN target z means a bad target, unless the row may hold a NaN logit or has no statistics.
    const bool bad_target = is_nan(target_z) && (status & (kNanLogit | kBadTemperature | kBadKept)) == 0;
    return {nan, nan, nan, nan, status | (bad_target ? kBadTarget : 0)};
  }
  const float log2_sum = log2(root.S);
  const float lse = mul_rn(kLn2, add_rn(root.m, log2_sum));
  const float mean_z = div_rn(div_rn(root.E, root.S), temperature);
  const float entropy = sub_rn(lse, mean_z);
  const float sum_p_sq = div_rn(root.Q, mul_rn(root.S, root.S));
  const float lp = mul_rn(kLn2, sub_rn(fma_rn(target_z, log2_scale(temperature), -root.m), log2_sum));
  if (is_nan(target_z)) status = kBadTarget;
  if (target_z == -infinity()) status = kLabelMasked;
  const float logprob = negative_part(lp), at_least_0 = positive_part(entropy);
  return {status == kBadTarget ? nan : logprob, lse, at_least_0, sum_p_sq, status};
}

// logprob under label smoothing, from a row's logprob and lse and the sum of z over its `columns` columns.
RLK_HD float smoothed_logprob(float logprob, float lse, float sum_z, float columns, float temperature,
                              float label_smoothing) {
  const float mean = sub_rn(div_rn(div_rn(sum_z, columns), temperature), lse);
  if (is_nan(logprob) || is_nan(mean)) return canonical_nan();
  return fma_rn(label_smoothing, negative_part(mean), mul_rn(sub_rn(1.0f, label_smoothing), logprob));
}

}  // namespace rlk
