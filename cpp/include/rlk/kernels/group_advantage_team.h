// group_advantage by teams of 32 lanes, shared by CUDA and HIP. A Team gives lane(), shuffle_xor of float and int, and
// writes(): whether this lane's stores are its own (a wave of 64 does a team's work twice).
#pragma once

#include "rlk/kernels/group_advantage_check.h"
#include "rlk/kernels/group_advantage_row.h"

namespace rlk {

constexpr int kTeamLanes = 32;
constexpr int kLaneMembers = kSumChunk / kTeamLanes;

// Of a chunk's members, the lane's own: f(member), +0 where there is none. All lanes get the tree's sum.
template <class Team, class F>
RLK_DEVICE float sum_of_chunk(const Team& team, std::int64_t first, std::int64_t num, const F& f) {
  float v[kLaneMembers];
#pragma unroll
  for (int j = 0; j < kLaneMembers; ++j) {
    const std::int64_t i = first + team.lane() * kLaneMembers + j;
    v[j] = i < num ? f(i) : 0.0f;
  }
  float sum = add_rn(add_rn(v[0], v[1]), add_rn(v[2], v[3]));
#pragma unroll
  for (int h = 1; h < kTeamLanes; h *= 2) sum = add_rn(sum, team.shuffle_xor(sum, h));
  return sum;
}

// What of the members needs no order.
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

// A group of `num` members; index(member) is its sequence.
template <class Team, class Index>
RLK_DEVICE void advantages_of_group(const Team& team, const GroupAdvantageParams& p, const BatchStatistics& batch,
                                    std::int64_t num, const Index& index) {
  const auto reward = [&](std::int64_t member) { return p.rewards[index(member) * p.reward_stride]; };
  const auto sum = [&](const auto& f) {
    float total = 0.0f;
#pragma unroll 1
    for (std::int64_t first = 0; first < num; first += kSumChunk) {
      total = add_rn(total, sum_of_chunk(team, first, num, f));
    }
    return total;
  };
  MemberCounts c;
#pragma unroll 1
  for (std::int64_t member = team.lane(); member < num; member += kTeamLanes) {
    c.add(counts_of(p, reward(member), member));
  }
  c = all_of_team(team, c);
  GroupStatistics g;
  if (begin_statistics(p.alone, c.n, c.nans > 0, c.extremes, &g)) {
    const float total = sum([&](std::int64_t m) { return counted_or_zero(p, reward(m), reward(m)); });
    g.mean = div_rn(total, float_of_count(g.n));
    const float squares =
        sum([&](std::int64_t m) { return counted_or_zero(p, reward(m), deviation_squared(reward(m), g.mean)); });
    g.std = std_of(squares, g.n);
    g.baseline = g.mean;
    if (p.baseline_kind == GroupBaseline::kLengthMean) {
      const float lengths = sum([&](std::int64_t m) { return counted_or_zero(p, reward(m), length_of(p, index(m))); });
      const float weighted =
          sum([&](std::int64_t m) { return counted_or_zero(p, reward(m), mul_rn(length_of(p, index(m)), reward(m))); });
      g.baseline = lengths == 0.0f ? 0.0f : div_rn(weighted, lengths);
    }
  }
  if (!team.writes()) return;
#pragma unroll 1
  for (std::int64_t member = team.lane(); member < num; member += kTeamLanes) {
    write_member(p, g, batch, member, index(member));
  }
}

// The batch, by a block of teams. A Block gives a Team, its number in the block and how many there are, barrier(), and
// memory that its lanes share: a float and a MemberCounts for each team.
template <class Block>
RLK_DEVICE void statistics_of_batch(const Block& block, const GroupAdvantageParams& p, BatchStatistics* to) {
  const auto& team = block.team();
  const std::int64_t num = p.num_sequences, step = std::int64_t{block.teams()} * kSumChunk;
  const auto reward = [&](std::int64_t i) { return p.rewards[i * p.reward_stride]; };
  const auto sum = [&](const auto& f) {
    float total = 0.0f;
#pragma unroll 1
    for (std::int64_t first = 0; first < num; first += step) {
      const float of_chunk = sum_of_chunk(team, first + std::int64_t{block.number()} * kSumChunk, num, f);
      block.barrier();
      if (team.lane() == 0) block.sums()[block.number()] = of_chunk;
      block.barrier();
      for (int t = 0; t < block.teams() && first + t * kSumChunk < num; ++t) total = add_rn(total, block.sums()[t]);
    }
    return total;
  };
  MemberCounts c;
  for (std::int64_t i = block.number() * kTeamLanes + team.lane(); i < num; i += block.teams() * kTeamLanes) {
    c.add(counts_of(p, reward(i), i));
  }
  c = all_of_team(team, c);
  if (team.lane() == 0) block.counts()[block.number()] = c;
  block.barrier();
  c = MemberCounts();
#pragma unroll 1
  for (int t = 0; t < block.teams(); ++t) c.add(block.counts()[t]);
  GroupStatistics g;
  if (begin_statistics(p.alone, c.n, c.nans > 0, c.extremes, &g)) {
    const float total = sum([&](std::int64_t i) { return counted_or_zero(p, reward(i), reward(i)); });
    g.mean = div_rn(total, float_of_count(g.n));
    const float squares =
        sum([&](std::int64_t i) { return counted_or_zero(p, reward(i), deviation_squared(reward(i), g.mean)); });
    g.std = std_of(squares, g.n);
  }
  if (team.lane() != 0 || block.number() != 0 || !team.writes()) return;
  *to = {g.std, div_rn(float_of_count(c.n), float_of_count(c.nonzero > 0 ? c.nonzero : 1))};
}

// Members of groups that ids give, in memory: of sequence i the first of its group, its place in it, how many there are;
// groups one after another, each where `first` of its first member says.
struct MemberOrder {
  std::int32_t *head, *place, *count, *first, *order;  // [num_sequences] each
  RLK_HD MemberOrder(void* workspace, std::int64_t num)
      : head(static_cast<std::int32_t*>(workspace)),
        place(head + num),
        count(place + num),
        first(count + num),
        order(first + num) {}
};
constexpr std::int64_t kBatchStatisticsBytes = 8;
RLK_HD void* order_memory(const GroupAdvantageParams& p) {
  return static_cast<unsigned char*>(p.workspace) + kBatchStatisticsBytes;
}
inline std::int64_t workspace_bytes_of_teams(const GroupAdvantageParams& p) {
  if (p.group_ids != nullptr) return kBatchStatisticsBytes + p.num_sequences * 5 * 4;
  return reads_batch(p) ? kBatchStatisticsBytes : 0;
}

template <class Team>
RLK_DEVICE void find_group(const Team& team, const GroupAdvantageParams& p, std::int64_t i) {
  const std::int64_t num = p.num_sequences, id = load_index(p.group_ids, p.index_dtype, i);
  std::int32_t head = 0x7fffffff, before = 0, count = 0;
  for (std::int64_t j = team.lane(); j < num; j += kTeamLanes) {
    if (load_index(p.group_ids, p.index_dtype, j) != id) continue;
    if (j < head) head = static_cast<std::int32_t>(j);
    if (j < i) ++before;
    ++count;
  }
#pragma unroll
  for (int h = 1; h < kTeamLanes; h *= 2) {
    const std::int32_t other = team.shuffle_xor(head, h);
    head = other < head ? other : head;
    before += team.shuffle_xor(before, h);
    count += team.shuffle_xor(count, h);
  }
  if (team.lane() != 0 || !team.writes()) return;
  const MemberOrder o(order_memory(p), num);
  o.head[i] = head;
  o.place[i] = before;
  o.count[i] = count;
}

// After all find_group.
template <class Team>
RLK_DEVICE void place_member(const Team& team, const GroupAdvantageParams& p, std::int64_t i) {
  const MemberOrder o(order_memory(p), p.num_sequences);
  const std::int32_t head = o.head[i];
  std::int32_t before = 0;
  for (std::int64_t j = team.lane(); j < p.num_sequences; j += kTeamLanes) before += o.head[j] < head ? 1 : 0;
#pragma unroll
  for (int h = 1; h < kTeamLanes; h *= 2) before += team.shuffle_xor(before, h);
  if (team.lane() != 0 || !team.writes()) return;
  o.first[i] = before;
  o.order[before + o.place[i]] = static_cast<std::int32_t>(i);
}

// Group `i`; of ids that of sequence i, whose first member's team does the work.
template <class Team>
RLK_DEVICE void run_group(const Team& team, const GroupAdvantageParams& p, std::int64_t i) {
  BatchStatistics batch;
  if (reads_batch(p)) batch = *static_cast<const BatchStatistics*>(p.workspace);
  if (p.group_ids != nullptr) {
    const MemberOrder o(order_memory(p), p.num_sequences);
    if (o.place[i] != 0) return;
    const std::int32_t* members = o.order + o.first[i];
    advantages_of_group(team, p, batch, o.count[i], [&](std::int64_t m) { return std::int64_t{members[m]}; });
    return;
  }
  OffsetRange r = {i * p.group_size, (i + 1) * p.group_size};
  if (p.group_offsets != nullptr) r = range_of(p.group_offsets, p.index_dtype, i, p.num_sequences);
  advantages_of_group(team, p, batch, r.end - r.begin, [&](std::int64_t m) { return r.begin + m; });
}
inline std::int64_t num_groups_of_teams(const GroupAdvantageParams& p) {
  return p.group_ids != nullptr       ? p.num_sequences
         : p.group_offsets != nullptr ? p.num_groups
                                      : p.num_sequences / p.group_size;
}

}  // namespace rlk
