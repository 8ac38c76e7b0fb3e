// group_advantage on teams of 32 lanes and on blocks of teams, which team_sum.h defines. CUDA and HIP share this file.
#pragma once

#include "kernels/advantages/group_advantage_check.h"
#include "kernels/advantages/group_advantage_row.h"
#include "kernels/advantages/merge_order.h"
#include "kernels/tokens/team_sum.h"

namespace rlk {

// Statistics that do not depend on the order of the members.
struct MemberCounts {
  Extremes extremes = no_extremes();
  std::int32_t n = 0, nans = 0, nonzero = 0;

  RLK_HD void add(const MemberCounts& o) {
    extremes.add(o.extremes);
    n += o.n;
    nans += o.nans;
    nonzero += o.nonzero;
  }
};
RLK_HD MemberCounts counts_of(const GroupAdvantageParams& p, float s, std::int64_t member) {
  MemberCounts c;
  const bool nan = is_nan(s);
  if (nan && p.exclude_nan) return c;
  c.n = 1;
  c.nans = nan ? 1 : 0;
  c.nonzero = s != 0.0f ? 1 : 0;
  if (!nan) c.extremes = {s, -infinity(), s, static_cast<std::int32_t>(member)};
  return c;
}

template <class Team>
RLK_DEVICE MemberCounts all_of_team(const Team& team, MemberCounts c) {
#pragma unroll
  for (int h = 1; h < kTeamLanes; h *= 2) {
    MemberCounts o;
    o.extremes.largest = team.shuffle_xor(c.extremes.largest, h);
    o.extremes.second = team.shuffle_xor(c.extremes.second, h);
    o.extremes.least = team.shuffle_xor(c.extremes.least, h);
    o.extremes.best = team.shuffle_xor(c.extremes.best, h);
    o.n = team.shuffle_xor(c.n, h);
    o.nans = team.shuffle_xor(c.nans, h);
    o.nonzero = team.shuffle_xor(c.nonzero, h);
    c.add(o);
  }
  return c;
}

RLK_DEVICE float counted_or_zero(const GroupAdvantageParams& p, float s, float x) {
  return p.exclude_nan && is_nan(s) ? 0.0f : x;
}

RLK_DEVICE BatchStatistics batch_of_workspace(const GroupAdvantageParams& p) {
  return reads_batch(p) ? *static_cast<const BatchStatistics*>(p.workspace) : BatchStatistics();
}

// A group of `num` members; index(member) gives a member's sequence.
template <class Team, class Index>
RLK_DEVICE void advantages_of_group(const Team& team, const GroupAdvantageParams& p, std::int32_t num,
                                    const Index& index) {
  const auto reward = [&](std::int32_t member) { return p.rewards[index(member) * p.reward_stride]; };
  const auto sum = [&](const auto& f) {
    return sum_of_team(team, num, [&](std::int32_t m) { return counted_or_zero(p, reward(m), f(m)); });
  };
  MemberCounts c;
#pragma unroll 1
  for (std::int32_t member = team.lane(); member < num; member += kTeamLanes) {
    c.add(counts_of(p, reward(member), member));
  }
  c = all_of_team(team, c);
  GroupStatistics g;
  const BatchStatistics batch = batch_of_workspace(p);
  const bool has_moments = begin_statistics(p.alone, c.n, c.nans > 0, c.extremes, &g);
  if (deviates_from_batch(p)) {
    if (g.n >= 2) find_deviation(sum, reward, c.extremes.least, batch, &g);
  } else if (has_moments) {
    find_moments(sum, reward, c.extremes.least, &g);
    if (p.baseline_kind == GroupBaseline::kLengthMean) {
      g.baseline = length_mean(
          sum, reward, [&](std::int32_t m) { return length_of(p, index(m)); }, g.scale);
    }
  }
  if (!team.writes()) return;
  if (p.baseline_kind == GroupBaseline::kBatchMean) {
    const BatchMeanScale scale(p, g, batch);
#pragma unroll 1
    for (std::int32_t member = team.lane(); member < num; member += kTeamLanes) {
      write_member(p, g, scale, batch, index(member));
    }
    return;
  }
  const MemberScale scale(p, g, batch);
#pragma unroll 1
  for (std::int32_t member = team.lane(); member < num; member += kTeamLanes) {
    write_member(p, g, scale, batch.alpha, member, index(member));
  }
}

// A block of teams computes the batch's statistics. counts() gives shared memory for one MemberCounts per team.
template <class Block>
RLK_DEVICE void statistics_of_batch(const Block& block, const GroupAdvantageParams& p, BatchStatistics* to) {
  const auto& team = block.team();
  const std::int32_t num = static_cast<std::int32_t>(p.num_sequences);
  const auto reward = [&](std::int32_t i) { return p.rewards[i * p.reward_stride]; };
  const auto sum = [&](const auto& f) {
    return sum_of_block(block, num, [&](std::int32_t i) { return counted_or_zero(p, reward(i), f(i)); });
  };
  MemberCounts c;
  constexpr int kTogether = 8;  // number of rewards that a lane loads before it uses any of them
  const std::int32_t step = block.teams() * kTeamLanes;
#pragma unroll 1
  for (std::int32_t i = block.number() * kTeamLanes + team.lane(); i < num; i += kTogether * step) {
    float s[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) s[k] = i + k * step < num ? reward(i + k * step) : 0.0f;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (i + k * step < num) c.add(counts_of(p, s[k], i + k * step));
    }
  }
  c = all_of_team(team, c);
  if (team.lane() == 0) block.counts()[block.number()] = c;
  block.barrier();
  c = all_of_team(team, team.lane() < block.teams() ? block.counts()[team.lane()] : MemberCounts());
  GroupStatistics g;
  if (begin_statistics(alone_in_batch(p), c.n, c.nans > 0, c.extremes, &g)) {
    find_moments(sum, reward, c.extremes.least, &g);
  }
  if (team.lane() != 0 || block.number() != 0 || !team.writes()) return;
  *to = {g.std, g.scale, div_rn(float_of_count(c.n), float_of_count(c.nonzero > 0 ? c.nonzero : 1)), g.mean};
}

// If groups are given by ids, the workspace holds the indices of the sequences, sorted by id. The sort in
// kernels/advantages/merge_order.h needs two arrays of indices. The second array holds the sorted indices.
constexpr std::int64_t kBatchStatisticsBytes = 16;
static_assert(sizeof(BatchStatistics) <= kBatchStatisticsBytes);
RLK_HD std::int32_t* order_memory(const GroupAdvantageParams& p, bool first) {
  auto* memory = static_cast<unsigned char*>(p.workspace) + kBatchStatisticsBytes;
  return reinterpret_cast<std::int32_t*>(memory) + (first ? 0 : p.num_sequences);
}
inline std::int64_t workspace_bytes_of_teams(const GroupAdvantageParams& p) {
  if (p.group_ids != nullptr) return kBatchStatisticsBytes + p.num_sequences * 2 * 4;
  return reads_batch(p) ? kBatchStatisticsBytes : 0;
}

RLK_DEVICE std::int64_t group_id(const GroupAdvantageParams& p, std::int64_t i) {
  return load_index(p.group_ids, p.index_dtype, i);
}
// Moves the index at place `at` to its place after one merge pass.
RLK_DEVICE void merge_ids(const GroupAdvantageParams& p, std::int32_t run, bool from_first, std::int32_t at) {
  merge_index<PlainMemory>([&](std::int64_t i) { return group_id(p, i); }, static_cast<std::int32_t>(p.num_sequences),
                           run, at, order_memory(p, from_first), order_memory(p, !from_first));
}

// Computes group `i`. Groups are given by offsets, or by a group size.
template <class Team>
RLK_DEVICE void run_range(const Team& team, const GroupAdvantageParams& p, std::int64_t i) {
  OffsetRange r = {i * p.group_size, (i + 1) * p.group_size};
  if (p.group_offsets != nullptr) r = range_of({p.group_offsets, p.index_dtype}, i, p.num_sequences);
  const auto begin = static_cast<std::int32_t>(r.begin);
  advantages_of_group(team, p, static_cast<std::int32_t>(r.end) - begin,
                      [=](std::int32_t m) { return std::int64_t{begin + m}; });
}

// The group whose first member is at place `at` of the order, if a group begins there.
template <class Team>
RLK_DEVICE void run_ids(const Team& team, const GroupAdvantageParams& p, std::int64_t at) {
  const std::int32_t* order = order_memory(p, false);
  const auto id_at = [&](std::int64_t k) { return group_id(p, order[k]); };
  const std::int64_t id = id_at(at);
  if (at > 0 && id_at(at - 1) == id) return;
  std::int32_t num = 0, run = kTeamLanes;
#pragma unroll 1
  // each pass adds the neighbouring members with this id, up to the first lane with another id
  for (; run == kTeamLanes; num += run) {
    const std::int64_t k = at + num + team.lane();
    run = k < p.num_sequences && id_at(k) == id ? kTeamLanes : team.lane();
#pragma unroll
    for (int h = 1; h < kTeamLanes; h *= 2) {
      const std::int32_t other = team.shuffle_xor(run, h);
      run = other < run ? other : run;
    }
  }
  advantages_of_group(team, p, num, [&](std::int32_t m) { return std::int64_t{order[at + m]}; });
}
inline std::int64_t num_groups_of_teams(const GroupAdvantageParams& p) {
  return p.group_ids != nullptr       ? p.num_sequences
         : p.group_offsets != nullptr ? p.num_groups
                                      : p.num_sequences / p.group_size;
}

}  // namespace rlk
