// CPU backend of the operator `group_advantage`: groups are spread over threads.
#include "rlk/ops/group_advantage.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "float_environment.h"
#include "kernels/advantages/group_advantage_check.h"
#include "kernels/advantages/group_advantage_row.h"
#include "rlk/backends.h"
#include "rows.h"
#include "thread_pool.h"
#include "tree_sum.h"

namespace rlk::cpu {
namespace {

// The sequences of all groups, one group after another, and the start of each group.
struct Groups {
  std::vector<std::int64_t> members;  // if empty, place i holds sequence i
  std::vector<std::int64_t> starts;

  explicit Groups(const GroupAdvantageParams& p) : starts{0} {
    const auto index = [&](const void* from, std::int64_t i) { return load_index(from, p.index_dtype, i); };
    if (p.group_ids != nullptr) {
      members.resize(static_cast<std::size_t>(p.num_sequences));
      std::iota(members.begin(), members.end(), std::int64_t{0});
      std::stable_sort(members.begin(), members.end(),
                       [&](std::int64_t a, std::int64_t b) { return index(p.group_ids, a) < index(p.group_ids, b); });
      for (std::size_t i = 1; i < members.size(); ++i) {
        if (index(p.group_ids, members[i]) != index(p.group_ids, members[i - 1])) {
          starts.push_back(static_cast<std::int64_t>(i));
        }
      }
      starts.push_back(p.num_sequences);
    } else if (p.group_offsets != nullptr) {
      for (std::int64_t i = 1; i <= p.num_groups; ++i) starts.push_back(index(p.group_offsets, i));
    } else {
      for (std::int64_t i = p.group_size; i <= p.num_sequences; i += p.group_size) starts.push_back(i);
    }
  }
  std::int64_t count() const { return static_cast<std::int64_t>(starts.size()) - 1; }
};

// Statistics of a group of `num` members. The function index(member) gives the member's sequence.
template <class Index>
GroupStatistics statistics_of(const GroupAdvantageParams& p, std::int64_t num, const Index& index,
                              const BatchStatistics& batch, std::int32_t* nonzero) {
  const auto reward = [&](std::int64_t m) { return p.rewards[index(m) * p.reward_stride]; };
  const auto counts = [&](std::int64_t m) { return !p.exclude_nan || !is_nan(reward(m)); };
  std::int32_t n = 0, nans = 0;
  Extremes extremes = no_extremes();
  for (std::int64_t m = 0; m < num; ++m) {
    const float s = reward(m);
    if (!counts(m)) continue;
    ++n;
    *nonzero += s != 0.0f ? 1 : 0;
    if (is_nan(s)) {
      ++nans;
    } else {
      extremes.add({s, -infinity(), s, static_cast<std::int32_t>(m)});
    }
  }
  GroupStatistics g;
  const bool has_moments = begin_statistics(p.alone, n, nans > 0, extremes, &g);
  const auto sum = [&](const auto& f) {
    return tree_sum(num, [&](std::int64_t m) { return counts(m) ? f(m) : 0.0f; });
  };
  if (deviates_from_batch(p)) {
    if (n >= 2) find_deviation(sum, reward, extremes.least, batch, &g);
    return g;
  }
  if (!has_moments) return g;
  find_moments(sum, reward, extremes.least, &g);
  if (p.baseline_kind == GroupBaseline::kLengthMean) {
    g.baseline = length_mean(
        sum, reward, [&](std::int64_t m) { return length_of(p, index(m)); }, g.scale);
  }
  return g;
}

BatchStatistics batch_of(const GroupAdvantageParams& p) {
  BatchStatistics batch;
  if (!reads_batch(p)) return batch;
  GroupAdvantageParams of_means = p;
  of_means.alone = alone_in_batch(p);
  of_means.baseline_kind = GroupBaseline::kMean;
  std::int32_t nonzero = 0;
  const GroupStatistics g = statistics_of(
      of_means, p.num_sequences, [](std::int64_t i) { return i; }, batch, &nonzero);
  batch.std = g.std;
  batch.scale = g.scale;
  batch.mean = g.mean;
  batch.alpha = div_rn(float_of_count(g.n), float_of_count(std::max(nonzero, 1)));
  return batch;
}

}  // namespace

void group_advantage(const GroupAdvantageParams& p) {
  check_group_advantage(p);
  check_offset_values({p.group_offsets, p.index_dtype}, p.num_groups, p.num_sequences, "group_offsets",
                      "the number of sequences", true);
  if (p.num_sequences == 0) return;
  const Groups groups(p);
  BatchStatistics batch;
  {
    const FloatEnvironment environment;
    batch = batch_of(p);
  }
  const std::int64_t size = p.num_sequences / std::max<std::int64_t>(groups.count(), 1);
  parallel_for(groups.count(), rows_of_a_task(4 * size), [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = groups.starts[static_cast<std::size_t>(i)];
      const std::int64_t num = groups.starts[static_cast<std::size_t>(i) + 1] - first;
      const auto index = [&](std::int64_t m) {
        return groups.members.empty() ? first + m : groups.members[static_cast<std::size_t>(first + m)];
      };
      std::int32_t nonzero = 0;
      const GroupStatistics g = statistics_of(p, num, index, batch, &nonzero);
      if (p.baseline_kind == GroupBaseline::kBatchMean) {
        const BatchMeanScale scale(p, g, batch);
        for (std::int64_t m = 0; m < num; ++m) write_member(p, g, scale, batch, index(m));
        continue;
      }
      const MemberScale scale(p, g, batch);
      for (std::int64_t m = 0; m < num; ++m)
        write_member(p, g, scale, batch.alpha, static_cast<std::int32_t>(m), index(m));
    }
  });
}

}  // namespace rlk::cpu
