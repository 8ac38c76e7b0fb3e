// A second implementation of group_advantage, simple and slow, written from the contract, ops/group_advantage.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "rlk/ops/group_advantage.h"
#include "sum_reference.h"

namespace group_advantage_test {

using rlk::GroupAdvantageParams;
using rlk::GroupAlone;
using rlk::GroupBaseline;
using rlk::GroupScale;

struct Outputs {
  std::vector<float> advantage, mean, std;
  std::vector<std::int32_t> status;
};

// Inputs of a call, as the test made them.
struct Inputs {
  std::vector<float> rewards, lengths, baseline;
  std::vector<std::vector<std::int64_t>> groups;  // members of each group, ascending
};

inline float sum(const std::vector<float>& v) { return sum_test::tree(v) + 0.0f; }

struct Statistics {
  std::vector<bool> counts;
  std::int64_t n = 0, nonzero = 0;
  float scale = 1.0f;
  float mean = 0.0f, std = 0.0f;  // mean and deviation of the scaled rewards
  bool constant = false;
};

inline Statistics statistics_of(const GroupAdvantageParams& p, const Inputs& in, const std::vector<std::int64_t>& of) {
  Statistics s;
  std::vector<float> counted, values;
  for (const std::int64_t i : of) {
    const float r = in.rewards[i];
    s.counts.push_back(!(p.exclude_nan && std::isnan(r)));
    values.push_back(s.counts.back() ? r : 0.0f);
    if (!s.counts.back()) continue;
    counted.push_back(r);
    s.nonzero += r != 0.0f;
  }
  s.n = static_cast<std::int64_t>(counted.size());
  s.constant = s.n >= 2 && std::all_of(counted.begin(), counted.end(), [&](float r) { return r == counted[0]; });
  if (s.n == 1) {
    s.mean = p.alone == GroupAlone::kScore ? 0.0f : counted[0];
    s.std = p.alone == GroupAlone::kScore ? 1.0f : 0.0f;
  } else if (s.constant) {
    s.mean = counted[0] + 0.0f;
  } else if (s.n >= 2) {
    float least = std::numeric_limits<float>::infinity(), largest = -least;
    for (const float r : counted) {
      if (r < least) least = r;
      if (r > largest) largest = r;
    }
    const sum_test::Scale of = sum_test::scale_of(least, largest);
    s.scale = of.down * of.up;
    for (float& v : values) v *= s.scale;
    float mean = sum(values) / static_cast<float>(s.n);
    if (mean < least * s.scale) mean = least * s.scale;
    if (mean > largest * s.scale) mean = largest * s.scale;
    std::vector<float> squares;
    for (std::size_t m = 0; m < values.size(); ++m) {
      const float d = values[m] - mean;
      squares.push_back(s.counts[m] ? d * d : 0.0f);
    }
    s.std = std::sqrt(sum(squares) / static_cast<float>(s.n - 1));
    s.mean = mean;
  }
  return s;
}

inline float canonical(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

// kBatchMean: deviations of a group's rewards from the batch's mean, with two scales.
inline void write_batch_mean(const GroupAdvantageParams& p, const Inputs& in, const std::vector<std::int64_t>& group,
                             const Statistics& s, Statistics batch, float alpha, Outputs* out) {
  if (batch.n == 1) {  // the batch's mean is its reward, whatever `alone` says about groups
    GroupAdvantageParams zero = p;
    zero.alone = GroupAlone::kZero;
    std::vector<std::int64_t> everyone;
    for (std::size_t i = 0; i < in.rewards.size(); ++i) everyone.push_back(static_cast<std::int64_t>(i));
    batch = statistics_of(zero, in, everyone);
  }
  std::vector<float> from, squares;
  float least = std::numeric_limits<float>::infinity(), largest = -least;
  for (std::size_t m = 0; m < group.size(); ++m) {
    const float d = in.rewards[static_cast<std::size_t>(group[m])] * batch.scale - batch.mean;
    from.push_back(d);
    if (s.counts[m] && d < least) least = d;
    if (s.counts[m] && d > largest) largest = d;
  }
  const bool of_group = p.scale == GroupScale::kGroup;
  float up = p.scale == GroupScale::kBatch ? 1.0f : 1.0f / batch.scale;
  float std = s.std / s.scale, divisor = s.std + p.eps;
  if (p.scale == GroupScale::kBatch) {
    std = batch.std / batch.scale;
    divisor = batch.std + p.eps * batch.scale;
  } else if (of_group && s.n >= 2) {
    const sum_test::Scale of = sum_test::scale_of(least, largest);
    up = of.down * of.up;
    for (std::size_t m = 0; m < group.size(); ++m) {
      squares.push_back(s.counts[m] ? (from[m] * up) * (from[m] * up) : 0.0f);
    }
    const float r = std::sqrt(sum(squares) / static_cast<float>(s.n - 1));
    std = r / up / batch.scale;
    divisor = r + p.eps * batch.scale * up;
  }
  for (std::size_t m = 0; m < group.size(); ++m) {
    const std::size_t i = static_cast<std::size_t>(group[m]);
    float x = from[m] * up;
    if (p.scale != GroupScale::kNone && x != 0.0f) x = x / divisor;
    if (p.by_nonzero) x = alpha * x / p.f_norm;
    const bool alone = of_group && s.n == 1;
    if (!s.counts[m] || x == 0.0f || (alone && p.alone == GroupAlone::kZero && !std::isnan(in.rewards[i]))) x = 0.0f;
    out->advantage[i] = canonical(x);
    out->mean[i] = canonical(batch.mean / batch.scale);
    out->std[i] = canonical(std);
    out->status[i] = (alone ? 2 : 0) | (s.counts[m] ? 0 : 4) | (std::isfinite(x) ? 0 : 8);
  }
}

inline Outputs reference(const GroupAdvantageParams& p, const Inputs& in) {
  const std::size_t num = in.rewards.size();
  Outputs out;
  out.advantage.resize(num);
  out.mean.resize(num);
  out.std.resize(num);
  out.status.resize(num);
  std::vector<std::int64_t> everyone;
  for (std::size_t i = 0; i < num; ++i) everyone.push_back(static_cast<std::int64_t>(i));
  const Statistics batch = statistics_of(p, in, everyone);
  const float alpha = static_cast<float>(batch.n) / static_cast<float>(std::max<std::int64_t>(batch.nonzero, 1));
  const bool by_group = p.baseline_kind == GroupBaseline::kMean || p.baseline_kind == GroupBaseline::kLengthMean;
  for (const std::vector<std::int64_t>& group : in.groups) {
    const Statistics s = statistics_of(p, in, group);
    if (p.baseline_kind == GroupBaseline::kBatchMean) {
      write_batch_mean(p, in, group, s, batch, alpha, &out);
      continue;
    }
    float b = s.mean;
    if (p.baseline_kind == GroupBaseline::kLengthMean && s.n >= 2 && !s.constant) {
      std::vector<float> lengths, weighted;
      for (std::size_t m = 0; m < group.size(); ++m) {
        lengths.push_back(s.counts[m] ? in.lengths[group[m]] : 0.0f);
        weighted.push_back(s.counts[m] ? in.lengths[group[m]] * (in.rewards[group[m]] * s.scale) : 0.0f);
      }
      b = sum(lengths) == 0.0f ? 0.0f : sum(weighted) / sum(lengths);
    }
    // Index of the first largest reward, then of the second largest.
    std::vector<std::size_t> ranked;
    bool any_nan = false;
    for (std::size_t m = 0; m < group.size(); ++m) {
      if (s.counts[m]) ranked.push_back(m);
      any_nan = any_nan || (s.counts[m] && std::isnan(in.rewards[group[m]]));
    }
    if (!any_nan) {
      std::stable_sort(ranked.begin(), ranked.end(),
                       [&](std::size_t a, std::size_t c) { return in.rewards[group[a]] > in.rewards[group[c]]; });
    }
    for (std::size_t m = 0; m < group.size(); ++m) {
      const std::size_t i = static_cast<std::size_t>(group[m]);
      const float r = in.rewards[i];
      const float mine = p.baseline_kind == GroupBaseline::kGiven ? in.baseline[i] : by_group ? b / s.scale : 0.0f;
      const Statistics& divisor = p.scale == GroupScale::kBatch ? batch : s;
      float scale = p.scale == GroupScale::kNone ? 1.0f : divisor.scale;
      if (p.baseline_kind == GroupBaseline::kGiven) scale = std::min(scale, 1.0f);
      float x = r * scale - (by_group ? b * (scale / s.scale) : mine * scale);
      if (p.leave_one_out && s.n >= 2) x = static_cast<float>(s.n) / static_cast<float>(s.n - 1) * x;
      if (p.best_only) {
        x = 0.0f;
        if (s.n >= 2 && ranked[0] == m)
          x = in.rewards[group[ranked[0]]] * scale - in.rewards[group[ranked[1]]] * scale + 0.0f;
        if (any_nan) x = std::numeric_limits<float>::quiet_NaN();
      }
      if (p.scale != GroupScale::kNone) x = x / (divisor.std * (scale / divisor.scale) + p.eps * scale);
      if (p.by_nonzero) x = alpha * x / p.f_norm;
      const bool alone = by_group && s.n == 1;
      if (by_group && !any_nan && (s.constant || (alone && (p.alone == GroupAlone::kZero || p.best_only)))) x = 0.0f;
      if (!s.counts[m]) x = 0.0f;
      out.advantage[i] = canonical(x);
      out.mean[i] = canonical(mine);
      out.std[i] = canonical(divisor.std / divisor.scale);
      out.status[i] =
          (by_group && s.constant ? 1 : 0) | (alone ? 2 : 0) | (s.counts[m] ? 0 : 4) | (std::isfinite(x) ? 0 : 8);
    }
  }
  return out;
}

}  // namespace group_advantage_test
