// The formulas of ops/group_advantage.h behind the sums, shared by all backends.
#pragma once

#include "rlk/math/ieee.h"
#include "rlk/ops/group_advantage.h"
#include "rlk/tokens.h"

namespace rlk {

// Of a group, or of the batch.
struct GroupStatistics {
  float mean = 0.0f, std = 0.0f;
  float baseline = 0.0f;                // b of kMean and kLengthMean
  float largest = 0.0f, second = 0.0f;  // of the rewards that count
  std::int32_t best = -1;               // member that is the first largest
  std::int32_t n = 0;                   // that count
  bool constant = false;
};
struct BatchStatistics {
  float std = 0.0f;
  float alpha = 1.0f;  // n_b / max(number of rewards that are not 0, 1)
};

// Integers beyond 2^24 round to nearest even, as a conversion does everywhere.
RLK_HD float length_of(const GroupAdvantageParams& p, std::int64_t i) {
  const std::int64_t at = i * p.length_stride;
  if (p.length_dtype == DType::kFloat32) return static_cast<const float*>(p.lengths)[at];
  return static_cast<float>(load_index(p.lengths, p.length_dtype, at));
}

RLK_HD float float_of_count(std::int32_t n) { return static_cast<float>(n); }

// The largest reward, which member has it first, the second largest, the least: of any members, in any order.
struct Extremes {
  float largest, second, least;
  std::int32_t best;  // 0x7fffffff: none

  RLK_HD void add(const Extremes& o) {
    const bool other = o.largest > largest || (o.largest == largest && o.best < best);
    const float loser = other ? largest : o.largest, after = other ? o.second : second;
    second = loser > after ? loser : after;
    largest = other ? o.largest : largest;
    best = other ? o.best : best;
    least = o.least < least ? o.least : least;
  }
};
RLK_HD Extremes no_extremes() { return {-infinity(), -infinity(), infinity(), 0x7fffffff}; }

RLK_HD float deviation_squared(float s, float mean) {
  const float d = sub_rn(s, mean);
  return mul_rn(d, d);
}
RLK_HD float std_of(float sum_of_squares, std::int32_t n) {
  return sqrt_rn(div_rn(sum_of_squares, float_of_count(n - 1)));
}
// n, constant and, where no sum is needed, mean and std; whether one is.
RLK_HD bool begin_statistics(GroupAlone alone, std::int32_t n, bool any_nan, const Extremes& e, GroupStatistics* g) {
  g->n = n;
  g->largest = e.largest;
  g->second = e.second;
  g->best = e.best;
  g->constant = n >= 2 && !any_nan && e.least == e.largest;
  if (n == 1) {
    g->mean = alone == GroupAlone::kScore ? 0.0f : any_nan ? canonical_nan() : e.largest;
    g->std = alone == GroupAlone::kScore ? 1.0f : 0.0f;
  } else if (g->constant) {
    g->mean = add_rn(e.largest, 0.0f);
  }
  g->baseline = g->mean;
  return n >= 2 && !g->constant;
}

// What of a group's members is the same for all.
struct MemberScale {
  float std, divisor, factor;
  RLK_HD MemberScale(const GroupAdvantageParams& p, const GroupStatistics& g, const BatchStatistics& batch)
      : std(p.scale == GroupScale::kBatch ? batch.std : g.std),
        divisor(add_rn(std, p.eps)),
        factor(g.n >= 2 ? div_rn(float_of_count(g.n), float_of_count(g.n - 1)) : 1.0f) {}
};

// Writes what a member gets.
RLK_HD void write_member(const GroupAdvantageParams& p, const GroupStatistics& g, const MemberScale& scale, float alpha,
                         std::int32_t member, std::int64_t i) {
  const float s = p.rewards[i * p.reward_stride];
  const bool excluded = p.exclude_nan && is_nan(s);
  const bool of_group = p.baseline_kind == GroupBaseline::kMean || p.baseline_kind == GroupBaseline::kLengthMean;
  const float b = p.baseline_kind == GroupBaseline::kGiven ? p.baseline[i * p.baseline_stride]
                  : of_group                               ? g.baseline
                                                           : 0.0f;
  float x = sub_rn(s, b);
  if (p.leave_one_out && g.n >= 2) x = mul_rn(scale.factor, x);
  if (p.best_only) {
    x = member == g.best ? add_rn(sub_rn(g.largest, g.second), 0.0f) : 0.0f;
    if (is_nan(g.std) || is_nan(s)) x = canonical_nan();  // a NaN is the largest nowhere
  }
  if (p.scale != GroupScale::kNone) x = div_rn(x, scale.divisor);
  if (p.by_nonzero) x = div_rn(mul_rn(alpha, x), p.f_norm);
  const bool alone = of_group && g.n == 1;
  const bool nothing = of_group && (g.constant || (alone && (p.alone == GroupAlone::kZero || p.best_only)));
  if (excluded || (nothing && !is_nan(s))) x = 0.0f;
  x = select(is_nan(x), canonical_nan(), x);
  p.advantage[i] = x;
  if (p.mean != nullptr) p.mean[i] = select(is_nan(b), canonical_nan(), b);
  if (p.std != nullptr) p.std[i] = select(is_nan(scale.std), canonical_nan(), scale.std);
  if (p.status != nullptr) {
    p.status[i] = (of_group && g.constant ? kGroupConstant : 0) | (alone ? kGroupAlone : 0) |
                  (excluded ? kSequenceExcluded : 0) | (is_nan(x) || abs_of(x) == infinity() ? kAdvantageNotFinite : 0);
  }
}

}  // namespace rlk
