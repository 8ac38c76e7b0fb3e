// Writes the kept sets of sample's rows (the columns that top_k, top_p and min_p keep) as CSR. First a team of threads
// (row.h) turns counts into offsets. Then teams turn the rows' masks into ids.
#pragma once

#include "kernels/sample/row.h"

namespace rlk {

// One team processes rows [first, first + rows). On entry, kept_offsets[row + 1] is the row's count. The function
// replaces the counts by offsets. *closed tells whether an earlier row did not fit into kept_ids, and is updated for
// later rows.
template <class Team>
RLK_DEVICE void offsets_of_counts(const Team& team, const SampleParams& p, std::int64_t first, std::int64_t rows,
                                  std::uint32_t* closed, SampleShared* shared) {
  const auto offsets = team.global(p.kept_offsets) + first;
  if (first == 0 && team.thread() == 0) {
    offsets[0] = 0;
    *closed = 0;
  }
  team.barrier();
  for (std::int64_t tile = 0; tile < rows; tile += team.threads()) {
    const std::int64_t i = tile + team.thread();
    const std::int64_t count = i < rows ? offsets[i + 1] : 0, begin = offsets[tile];
    const bool was_closed = *closed != 0;
    team.barrier();
    std::uint64_t *from = shared->masses, *to = shared->masses + kMaxTeam;
    from[team.thread()] = static_cast<std::uint64_t>(count);
    team.barrier();
    for (int distance = 1; distance < team.threads(); distance *= 2) {
      to[team.thread()] =
          from[team.thread()] + (team.thread() >= distance ? from[team.thread() - distance] : std::uint64_t{0});
      team.barrier();
      std::uint64_t* const other = from;
      from = to;
      to = other;
    }
    const auto end_of = [&](int thread) { return begin + static_cast<std::int64_t>(from[thread]); };
    const auto fits = [&](int thread) { return !was_closed && end_of(thread) <= p.kept_capacity; };
    // Finds the last thread whose row fits, or kLastRank if no row fits. The ends ascend, so all rows before that row
    // fit.
    if (team.thread() == 0) shared->found_prefix = fits(0) ? 0 : kLastRank;
    team.barrier();
    if (team.thread() > 0 && fits(team.thread()) && (team.thread() + 1 == team.threads() || !fits(team.thread() + 1))) {
      shared->found_prefix = static_cast<std::uint64_t>(team.thread());
    }
    team.barrier();
    const std::uint64_t last = shared->found_prefix;
    const std::int64_t end_of_fitting = last == kLastRank ? begin : end_of(static_cast<int>(last));
    if (i < rows) {
      const bool fit = fits(team.thread());
      offsets[i + 1] = fit ? end_of(team.thread()) : end_of_fitting;
      if (!fit && count > 0) {
        team.global(p.status)[first + i] |= kKeptOverflow;
        if (p.logprob != nullptr) team.global(p.logprob)[first + i] = canonical_nan();
        for (std::int64_t k = (first + i) * p.n_logprobs; p.top_ids && k < (first + i + 1) * p.n_logprobs; ++k) {
          team.global(p.top_ids)[k] = -1;
          team.global(p.top_logprobs)[k] = canonical_nan();
        }
        *closed = 1;
      }
    }
    team.barrier();
  }
}

// Writes the ids of a row's kept columns, which its mask marks.
template <class Team>
RLK_DEVICE void write_kept_ids(const Team& team, const SampleParams& p, std::int64_t row, const std::uint32_t* mask,
                               SampleShared* shared) {
  const std::int64_t begin = team.global(p.kept_offsets)[row], end = team.global(p.kept_offsets)[row + 1];
  if (end == begin) return;
  const int height = leaf_height(p.vocab_size);
  const std::int64_t words = sample_mask_words(p.vocab_size), share = (words + team.threads() - 1) / team.threads();
  const std::int64_t from = team.thread() * share, to = from + share < words ? from + share : words;
  std::uint64_t mine = 0;
  for (std::int64_t w = from; w < to; ++w) {
    mine += static_cast<std::uint64_t>(set_bits_of(team.global(mask)[w]));
  }
  std::uint64_t *sums = shared->masses, *next = shared->masses + kMaxTeam;
  sums[team.thread()] = mine;
  team.barrier();
  for (int distance = 1; distance < team.threads(); distance *= 2) {
    next[team.thread()] =
        sums[team.thread()] + (team.thread() >= distance ? sums[team.thread() - distance] : std::uint64_t{0});
    team.barrier();
    std::uint64_t* const other = sums;
    sums = next;
    next = other;
  }
  auto out = team.global(p.kept_ids) + begin + static_cast<std::int64_t>(sums[team.thread()] - mine);
  for (std::int64_t w = from; w < to; ++w) {
    const std::int64_t slot = w / kMaskWords;
    const std::int64_t first = part_cut(p.vocab_size, static_cast<int>(slot >> height)) +
                               (slot & ((std::int64_t{1} << height) - 1)) * kLeafColumns + w % kMaskWords * 32;
    for (std::uint32_t word = team.global(mask)[w]; word != 0; word &= word - 1) {
      *out++ = static_cast<std::int32_t>(first + lowest_bit_of(word));
    }
  }
  team.barrier();
}

}  // namespace rlk
