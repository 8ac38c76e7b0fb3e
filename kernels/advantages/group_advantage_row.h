// Formulas of ops/group_advantage.h after the sums, shared by all backends.
#pragma once

#include "rlk/math/moment_scale.h"
#include "rlk/ops/group_advantage.h"
#include "rlk/tokens.h"

namespace rlk {

// Statistics of a group, or of the batch.
struct GroupStatistics {
  float scale = 1.0f;  // mean, std and baseline are computed from the rewards times this factor
  float mean = 0.0f, std = 0.0f;
  float baseline = 0.0f;                // the number b of the contract for kMean and kLengthMean
  float largest = 0.0f, second = 0.0f;  // largest and second largest reward that counts
  std::int32_t best = -1;               // first member with the largest reward
  float up = 1.0f;                      // the number u of the contract for kBatchMean
  std::int32_t n = 0;                   // number of members that count (ops/group_advantage.h)
  bool constant = false, any_nan = false;
};
struct BatchStatistics {
  float std = 0.0f;  // standard deviation of the scaled rewards
  float scale = 1.0f;
  float alpha = 1.0f;  // n_b / max(number of rewards that are not 0, 1), where n_b members of the batch count
  float mean = 0.0f;   // mean of the scaled rewards
};

// A length as fp32. An integer beyond 2^24 rounds to nearest even. A negative length becomes NaN.
RLK_HD float length_of(const GroupAdvantageParams& p, std::int64_t i) {
  const std::int64_t at = i * p.length_stride;
  const float length = p.length_dtype == DType::kFloat32
                           ? static_cast<const float*>(p.lengths)[at]
                           : static_cast<float>(load_index(p.lengths, p.length_dtype, at));
  return length < 0.0f ? canonical_nan() : length;
}

// How a batch with one member is treated. If the baseline is the batch's mean, the baseline equals the only reward, so
// the advantage is 0.
RLK_HD GroupAlone alone_in_batch(const GroupAdvantageParams& p) {
  return p.baseline_kind == GroupBaseline::kBatchMean ? GroupAlone::kZero : p.alone;
}
// Whether a group's deviation is taken from the batch's mean, not from the group's mean.
RLK_HD bool deviates_from_batch(const GroupAdvantageParams& p) {
  return p.baseline_kind == GroupBaseline::kBatchMean && p.scale == GroupScale::kGroup;
}
RLK_HD float from_batch(const BatchStatistics& batch, float s) { return sub_rn(mul_rn(s, batch.scale), batch.mean); }

RLK_HD float float_of_count(std::int32_t n) { return static_cast<float>(n); }

// Largest reward, first member that has it, second largest, and least. Members may be added in any order.
struct Extremes {
  float largest, second, least;
  std::int32_t best;  // 0x7fffffff if there is none

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

// Sets the group's n, largest, second, best and constant. Also sets mean and std if no sum is needed for them. Returns
// whether mean and std need a sum.
RLK_HD bool begin_statistics(GroupAlone alone, std::int32_t n, bool any_nan, const Extremes& e, GroupStatistics* g) {
  g->n = n;
  g->any_nan = any_nan;
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
// Sets the remaining fields if begin_statistics returned true. reward(member) gives a reward; sum(f) adds f(member)
// over the members that count; `least` is the least reward.
template <class Sum, class Reward>
RLK_HD void find_moments(const Sum& sum, const Reward& reward, float least, GroupStatistics* g) {
  const float scale = moment_scale(least, g->largest).both();
  const float total = sum([&](auto m) { return mul_rn(reward(m), scale); });
  const float low = mul_rn(least, scale), high = mul_rn(g->largest, scale);
  float mean = div_rn(total, float_of_count(g->n));
  mean = select(mean < low, low, select(mean > high, high, mean));
  const float squares = sum([&](auto m) {
    const float d = sub_rn(mul_rn(reward(m), scale), mean);
    return mul_rn(d, d);
  });
  g->std = sqrt_rn(div_rn(squares, float_of_count(g->n - 1)));
  g->scale = scale;
  g->baseline = g->mean = mean;
}
// Deviation about the batch's mean, for a group whose n is at least 2.
template <class Sum, class Reward>
RLK_HD void find_deviation(const Sum& sum, const Reward& reward, float least, const BatchStatistics& batch,
                           GroupStatistics* g) {
  const float up = moment_scale(from_batch(batch, least), from_batch(batch, g->largest)).both();
  const float squares = sum([&](auto m) {
    const float e = mul_rn(from_batch(batch, reward(m)), up);
    return mul_rn(e, e);
  });
  g->std = sqrt_rn(div_rn(squares, float_of_count(g->n - 1)));
  g->up = up;
}
// The baseline b of kLengthMean, computed from scaled rewards; length(member) gives a length.
template <class Sum, class Reward, class Length>
RLK_HD float length_mean(const Sum& sum, const Reward& reward, const Length& length, float scale) {
  const float lengths = sum(length);
  const float weighted = sum([&](auto m) { return mul_rn(length(m), mul_rn(reward(m), scale)); });
  return lengths == 0.0f ? 0.0f : div_rn(weighted, lengths);
}

// The scale that all members of a group share.
struct MemberScale {
  float std;  // the standard deviation that the operator returns
  float scale, of_baseline, divisor, factor;
  RLK_HD MemberScale(const GroupAdvantageParams& p, const GroupStatistics& g, const BatchStatistics& batch)
      : MemberScale(p, g, p.scale == GroupScale::kBatch ? batch.std : g.std,
                    p.scale == GroupScale::kBatch ? batch.scale : g.scale) {}

 private:
  RLK_HD MemberScale(const GroupAdvantageParams& p, const GroupStatistics& g, float std_of_scaled, float of_std)
      : std(unscaled(std_of_scaled, of_std)),
        // Rewards are not scaled up if the caller gives the baseline, because the baseline may be larger than all
        // rewards.
        scale(p.scale == GroupScale::kNone || (p.baseline_kind == GroupBaseline::kGiven && of_std > 1.0f) ? 1.0f
                                                                                                          : of_std),
        of_baseline(unscaled(scale, g.scale)),
        divisor(add_rn(mul_rn(std_of_scaled, unscaled(scale, of_std)), mul_rn(p.eps, scale))),
        factor(g.n >= 2 ? div_rn(float_of_count(g.n), float_of_count(g.n - 1)) : 1.0f) {}
};

// The scale of a group's members for kBatchMean.
struct BatchMeanScale {
  float std, up, divisor;
  RLK_HD BatchMeanScale(const GroupAdvantageParams& p, const GroupStatistics& g, const BatchStatistics& batch)
      : std(unscaled(g.std, g.scale)), up(inverse_of(batch.scale)), divisor(1.0f) {
    const float eps = mul_rn(p.eps, batch.scale);
    if (p.scale == GroupScale::kBatch) {
      std = unscaled(batch.std, batch.scale);
      up = 1.0f;
      divisor = add_rn(batch.std, eps);
    } else if (p.scale == GroupScale::kGroup && g.n >= 2) {
      std = unscaled(unscaled(g.std, g.up), batch.scale);
      up = g.up;
      divisor = add_rn(g.std, mul_rn(eps, g.up));
    } else if (p.scale == GroupScale::kGroup) {
      divisor = add_rn(g.std, p.eps);
    }
  }
};

// Writes a member's results; b is the baseline to subtract.
RLK_HD void write_results(const GroupAdvantageParams& p, std::int64_t i, float x, float b, float std,
                          std::int32_t status) {
  x = select(is_nan(x), canonical_nan(), x);
  p.advantage[i] = x;
  if (p.mean != nullptr) p.mean[i] = select(is_nan(b), canonical_nan(), b);
  if (p.std != nullptr) p.std[i] = select(is_nan(std), canonical_nan(), std);
  if (p.status != nullptr) {
    p.status[i] = status | (is_nan(x) || abs_of(x) == infinity() ? kAdvantageNotFinite : 0);
  }
}
RLK_HD void write_member(const GroupAdvantageParams& p, const GroupStatistics& g, const BatchMeanScale& scale,
                         const BatchStatistics& batch, std::int64_t i) {
  const float s = p.rewards[i * p.reward_stride];
  const bool excluded = p.exclude_nan && is_nan(s), of_group = p.scale == GroupScale::kGroup;
  float x = mul_rn(from_batch(batch, s), scale.up);
  if (x != 0.0f && p.scale != GroupScale::kNone) x = div_rn(x, scale.divisor);
  if (p.by_nonzero) x = div_rn(mul_rn(batch.alpha, x), p.f_norm);
  const bool nothing = of_group && g.n == 1 && p.alone == GroupAlone::kZero && !is_nan(s);
  if (excluded || nothing || x == 0.0f) x = 0.0f;
  write_results(p, i, x, unscaled(batch.mean, batch.scale), scale.std,
                (of_group && g.n == 1 ? kGroupAlone : 0) | (excluded ? kSequenceExcluded : 0));
}
// Writes a member's results for every baseline except kBatchMean.
RLK_HD void write_member(const GroupAdvantageParams& p, const GroupStatistics& g, const MemberScale& scale, float alpha,
                         std::int32_t member, std::int64_t i) {
  const float s = p.rewards[i * p.reward_stride];
  const bool excluded = p.exclude_nan && is_nan(s);
  const bool of_group = p.baseline_kind == GroupBaseline::kMean || p.baseline_kind == GroupBaseline::kLengthMean;
  const float b = p.baseline_kind == GroupBaseline::kGiven ? p.baseline[i * p.baseline_stride]
                  : of_group                               ? unscaled(g.baseline, g.scale)
                                                           : 0.0f;
  float x = sub_rn(mul_rn(s, scale.scale), of_group ? mul_rn(g.baseline, scale.of_baseline) : mul_rn(b, scale.scale));
  if (p.leave_one_out && g.n >= 2) x = mul_rn(scale.factor, x);
  if (p.best_only) {
    x = member == g.best ? add_rn(sub_rn(mul_rn(g.largest, scale.scale), mul_rn(g.second, scale.scale)), 0.0f) : 0.0f;
    if (g.any_nan || is_nan(s)) x = canonical_nan();  // comparisons never choose a NaN as the best reward
  }
  if (p.scale != GroupScale::kNone) x = div_rn(x, scale.divisor);
  if (p.by_nonzero) x = div_rn(mul_rn(alpha, x), p.f_norm);
  const bool alone = of_group && g.n == 1;
  const bool nothing = of_group && (g.constant || (alone && (p.alone == GroupAlone::kZero || p.best_only)));
  if (excluded || (nothing && !is_nan(s))) x = 0.0f;
  write_results(
      p, i, x, b, scale.std,
      (of_group && g.constant ? kGroupConstant : 0) | (alone ? kGroupAlone : 0) | (excluded ? kSequenceExcluded : 0));
}

}  // namespace rlk
