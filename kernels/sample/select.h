// Selects the columns of a row that sample keeps. Columns are ordered by rank (terms.h): by descending z, then by
// ascending id. The result is the rank of the last kept column and the least mass that min_p keeps, or a mask if few
// columns are kept. Surviving columns are those that min_p keeps; before min_p cuts, all columns survive. row.h defines
// a team.
#pragma once

#include "kernels/sample/row.h"

namespace rlk {

template <class Team, class T, Exp kExp, Columns kColumns = Columns::kRow>
class RowSelection : protected SampleColumns<Team, T, kExp, kColumns> {
 protected:
  using Base = SampleColumns<Team, T, kExp, kColumns>;
  using Base::at_, Base::first_column, Base::end_column;
  using Base::c_, Base::m_, Base::q_, Base::last_, Base::least_;
  using Base::is_allowed, Base::z_at, Base::mass_of, Base::survives, Base::reduce, Base::mask_bit_of;
  using Base::team_, Base::p_, Base::row_, Base::s_, Base::mask_, Base::state_, Base::height_;

 public:
  // firsts: kMaxTeam ranks of this row.
  RLK_DEVICE RowSelection(const Team& team, const SampleParams& p, std::int64_t row, SampleShared* shared,
                          std::uint32_t* mask, SampleState* state, std::uint64_t* firsts, const ColumnsAt& at = {})
      : Base(team, p, row, shared, mask, state, at), firsts_(firsts) {}

  // Finds the row's faults, its first rank, its reference, and the first rank among each thread's columns.
  RLK_DEVICE void run_first() {
    const SampleRow want = sample_row_of<typename Team::Memory>(p_, row_);
    std::int32_t status = want.status;
    std::int64_t id = -1;
    if (status == kOk && (want.greedy || want.truncates())) {
      c_ = team_.own(log2_scale(want.temperature));
      id = first_rank(&status);
    }
    if (team_.thread() == 0) *state_ = {kLastRank, 0, id, m_, q_, 0, status, 0, 0};
  }

  // Finds the columns that the row keeps, if top_k, top_p or min_p cut any.
  RLK_DEVICE void run_truncate() {
    const SampleRow want = sample_row_of<typename Team::Memory>(p_, row_);
    if (want.greedy || !want.truncates() || state_->status != kOk) return;
    c_ = team_.own(log2_scale(want.temperature));
    m_ = team_.own(state_->m);
    q_ = team_.own(state_->q);
    truncate(want, z_at(state_->id));
    if (listed_) mark_listed();
    if (team_.thread() == 0) {
      state_->last = last_;
      state_->least = least_;
      state_->marked = listed_ ? 1 : 0;
    }
  }

 protected:
  // Calls fn(rank, z) for this thread's share of the list.
  template <class F>
  RLK_DEVICE void each_listed(F fn) const {
    RLK_UNROLL_NOT
    for (std::int64_t i = team_.thread(); i < list_size_; i += team_.threads()) fn(s_.list[i], z_of_rank(s_.list[i]));
  }
  // Calls fn(rank, z) for this thread's present columns.
  template <class F>
  RLK_DEVICE void each_present(F fn) const {
    if constexpr (kColumns == Columns::kCandidates) {
      each_candidate(fn);
      return;
    }
    constexpr int kAhead = Team::kAhead;
    const auto end = static_cast<int>(end_column());
    RLK_UNROLL_NOT
    for (int base = static_cast<int>(first_column()) + team_.thread(); base < end; base += kAhead * team_.threads()) {
      float z[kAhead];
      RLK_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int j = base + i * team_.threads();
        z[i] = z_at(j < end ? j : base);
      }
      RLK_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int j = base + i * team_.threads();
        if (j < end && is_allowed(j)) fn(rank_of(z[i], j), z[i]);
      }
    }
  }
  // Calls fn(rank, z) for this thread's candidates with ranks in [from_, to_).
  template <class F>
  RLK_DEVICE void each_candidate(F fn) const {
    RLK_UNROLL_NOT
    for (int s = 0; s < at_.num_shards; ++s) {
      const auto words = team_.global(at_.candidates) + s * at_.candidates_apart;
      const std::int64_t count = words[kPayloadHead - 1];
      RLK_UNROLL_NOT
      for (std::int64_t i = team_.thread(); i < count; i += team_.threads()) {
        const std::uint64_t rank = static_cast<std::uint32_t>(words[kPayloadHead + 2 * i]) |
                                   static_cast<std::uint64_t>(words[kPayloadHead + 2 * i + 1]) << 32;
        if (rank >= from_ && rank < to_) fn(rank, z_of_rank(rank));
      }
    }
  }
  template <class F>
  RLK_DEVICE void each(F fn) const {
    listed_ ? each_listed(fn) : each_present(fn);
  }

  // Returns the first rank of the present columns, plus one. The result is 0 if there is a NaN, and kLastRank if no
  // column is present. The function also stores the first rank among each thread's columns.
  RLK_DEVICE std::uint64_t behind_first() const {
    std::uint64_t mine = kLastRank;
    each_present([&](std::uint64_t rank, float z) {
      const std::uint64_t at = is_nan(z) ? 0 : rank + 1;
      mine = at < mine ? at : mine;
    });
    firsts_[team_.thread()] = mine - 1;  // larger than any rank if the thread has no column
    return reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a < b ? a : b; });
  }
  // Returns the id of the present column with the first rank, and sets *status to the status of the present columns.
  RLK_DEVICE std::int64_t first_rank(std::int32_t* status) {
    const std::uint64_t first = behind_first();
    SoftmaxStats stats;
    const float z = first == kLastRank ? -infinity() : first == 0 ? canonical_nan() : z_of_rank(first - 1);
    const LeafReference reference = leaf_reference(c_, z, &stats);
    m_ = team_.own(reference.m);
    q_ = team_.own(reference.q);
    *status = reference.usable ? kOk : status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
    return id_of_rank(first - 1);
  }

  // One loop runs three searches, so that the binary holds their code only once. The first search finds a bound of the
  // first k columns. The second finds the first k columns themselves. The third finds the column at which top_p's mass
  // is reached. `z` belongs to the first rank. For kListed, the list already exists and holds all columns that may be
  // among the first k.
  RLK_DEVICE void truncate(const SampleRow& want, float z) {
    const std::uint64_t min_mass = team_.own(share_of_mass(want.min_p, mass_of(z)));
    if (p_.order == SampleOrder::kVllm) least_ = min_mass;  // otherwise min_p cuts last
    const bool by_mass = want.top_p<1.0f, by_count = want.top_k> 0 && want.top_k < p_.valid_vocab;
    const auto count = team_.own(static_cast<std::uint64_t>(want.top_k));
    // whether top_p's total is the mass of all columns, not only of those that top_k keeps
    [[maybe_unused]] const bool apart = p_.order == SampleOrder::kSglang && by_count;
    std::uint64_t total = 0;
    RLK_UNROLL_NOT
    for (int step = 0; step < 3; ++step) {
      if constexpr (Team::kSearchesByZ) {
        if (by_mass && apart && step == 0) total = total_mass();
      } else {
        if (by_mass && step == (p_.order == SampleOrder::kSglang ? 0 : 2)) total = team_.own(total_mass());
      }
      if (kColumns == Columns::kListed && step == 0) continue;
      if (step == 0 && (!by_count || count > static_cast<std::uint64_t>(team_.threads()) || least_ > 0)) continue;
      if (step == 1 && !by_count) continue;
      if (step == 2 && !by_mass) continue;
      if (step == 0) {  // lists the first rank of each thread; the count-th of these ranks is a bound of the first k
                        // columns
        team_.barrier();
        s_.list[team_.thread()] = firsts_[team_.thread()];
        team_.barrier();
        listed_ = true;
        list_size_ = team_.threads();
      }
      std::uint64_t found;
      if constexpr (Team::kSearchesByZ) {
        std::uint64_t goal = kLastRank, last = kLastRank;
        bool keeps_list = true;
        if (step == 2) {
          goal = apart ? share_of_mass(want.top_p, total) : 0;
          goal = list_bin(z, apart ? 1.0f : want.top_p, goal, &last, &keeps_list);
        }
        found = last_kept(step < 2 ? count : kLastRank, goal, step == 0);
        if (step == 2) {
          listed_ = listed_ && keeps_list;
          found = found < last ? found : last;
        }
      } else {
        found =
            last_kept(step < 2 ? count : kLastRank, step < 2 ? kLastRank : share_of_mass(want.top_p, total), step == 0);
      }
      if (step > 0) {
        last_ = found;
      } else {
        listed_ = listed_ && static_cast<std::uint64_t>(list_size_) >= count;  // threads without a column give no bound
      }
    }
    least_ = min_mass;
  }

  // The first step of a search for the first columns whose masses add up to a goal. This step visits the surviving
  // columns up to rank last_, and computes counts and masses of bins of equal width in z. z_first is the row's largest
  // z. The columns of the bin in which the goal is reached go to the list if they fit. The columns before this bin also
  // go to the list, if all of them fit. Returns the mass that the rest of the search must reach. share, goal: the goal
  // is this share of the visited columns' mass, or `goal` if the share is 1. last: receives the last rank of the list.
  // keeps_list: receives whether the list has the columns before the bin.
  RLK_DEVICE std::uint64_t list_bin(float z_first, float share, std::uint64_t goal, std::uint64_t* last,
                                    bool* keeps_list) {
    const float scale = mul_rn(c_, static_cast<float>(kDigitBins) / kMassRange);
    const auto bin_of = [&](float z) {
      const float x = mul_rn(sub_rn(z_first, z), scale);
      return x >= static_cast<float>(kDigitBins - 1) ? kDigitBins - 1 : x > 0.0f ? static_cast<int>(x) : 0;
    };
    team_.barrier();
    for (int i = team_.thread(); i < kDigitBins; i += team_.threads()) {
      s_.counts[i] = 0;
      s_.masses[i] = 0;
    }
    team_.barrier();
    each([&](std::uint64_t rank, float z) {
      if (rank > last_) return;
      const std::uint64_t w = mass_of(z);
      if (w < least_) return;
      team_.add(&s_.counts[bin_of(z)], std::uint32_t{1});
      team_.add(&s_.masses[bin_of(z)], w);
    });
    team_.barrier();
    if (share < 1.0f) goal = team_.own(share_of_mass(share, mass_of_bins()));
    find_bin(kDigitBins, kLastRank, goal, 0, 0);
    const std::uint64_t in_bin = s_.found_count, before = s_.found_rank_before, mass_before = s_.found_before;
    const int bin = static_cast<int>(s_.found_prefix);
    if (listed_ || in_bin > kListColumns) return goal;
    const bool all = before + in_bin <= kListColumns;
    *keeps_list = all;
    if (team_.thread() == 0) s_.listed = 0;
    team_.barrier();
    std::uint64_t mine = 0;
    each_present([&](std::uint64_t rank, float z) {
      if (rank > last_ || !survives(z)) return;
      const int own = bin_of(z);
      if (own > bin || (own < bin && !all)) return;
      s_.list[team_.take(&s_.listed)] = rank;
      mine = rank > mine ? rank : mine;
    });
    *last = reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a > b ? a : b; });
    list_size_ = s_.listed;
    listed_ = true;
    return all ? goal : team_.own(goal - mass_before);
  }
  // The sum of the bins' masses.
  RLK_DEVICE std::uint64_t mass_of_bins() const {
    for (int i = team_.thread(); i < kScanChunks; i += team_.threads()) {
      std::uint64_t w = 0;
      for (int k = 0; k < kDigitBins / kScanChunks; ++k) w += s_.masses[i * (kDigitBins / kScanChunks) + k];
      s_.chunk_masses[i] = w;
    }
    team_.barrier();
    std::uint64_t sum = 0;
    RLK_UNROLL_NOT
    for (int i = 0; i < kScanChunks; ++i) sum += s_.chunk_masses[i];
    team_.barrier();
    return sum;
  }

  RLK_DEVICE std::uint64_t total_mass() const {
    std::uint64_t mine = 0;
    each([&](std::uint64_t rank, float z) {
      const std::uint64_t w = rank <= last_ ? mass_of(z) : 0;
      mine += w >= least_ ? w : 0;
    });
    return reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; });
  }

  // Cuts the surviving columns with ranks up to last_. The function keeps `count` columns or, if `mass` is not
  // kLastRank, the first columns that together reach `mass`. If there are fewer columns, the function keeps all.
  // Returns the rank of the last kept column, or a rank between that column and the next one.
  // of_bounds: the list holds bounds of columns. The kept columns then replace these bounds in the list.
  RLK_DEVICE std::uint64_t last_kept(std::uint64_t count, std::uint64_t mass, bool of_bounds) {
    const bool weighs = mass != kLastRank;
    std::uint64_t prefix = team_.own(std::uint64_t{0}), count_before = prefix, mass_before = prefix;
    RLK_UNROLL_NOT
    for (int digit = 0; digit < kRankDigits; ++digit) {
      const int shift = digit_shift(digit), bits = digit_bits(digit), bins = 1 << bits;
      team_.barrier();
      for (int i = team_.thread(); i < bins; i += team_.threads()) {
        s_.counts[i] = 0;
        s_.masses[i] = 0;
      }
      team_.barrier();
      each([&](std::uint64_t rank, float z) {
        if (rank >> (shift + bits) != prefix || rank > last_) return;
        const std::uint64_t w = weighs || least_ > 0 ? mass_of(z) : 0;
        if (w < least_) return;
        const int bin = static_cast<int>(rank >> shift & (bins - 1));
        team_.add(&s_.counts[bin], std::uint32_t{1});
        if (weighs) team_.add(&s_.masses[bin], w);
      });
      team_.barrier();
      find_bin(bins, count, mass, count_before, mass_before);
      const std::uint64_t in_bin = s_.found_count;
      count_before = s_.found_rank_before;
      mass_before = s_.found_before;
      prefix = prefix << bits | s_.found_prefix;
      const std::uint64_t end = (prefix << shift) + ((std::uint64_t{1} << shift) - 1);
      // The whole bin is kept if the cut lies after its last column, or if it has at most one column.
      const bool whole = in_bin <= 1 || count_before + in_bin == count || digit == kRankDigits - 1;
      const bool replaces = whole && of_bounds;
      if (replaces) listed_ = false;
      if (!listed_ && (replaces || count_before + in_bin <= kListColumns)) collect(end);
      if (whole) return end < last_ ? end : last_;
    }
    return last_;
  }

  // Finds the bin in which `count` or `mass` is reached, the count and the mass before the bin, and the bin's count.
  RLK_DEVICE void find_bin(int bins, std::uint64_t count, std::uint64_t mass, std::uint64_t count_before,
                           std::uint64_t mass_before) const {
    const int chunk = bins / kScanChunks;
    for (int i = team_.thread(); i < kScanChunks; i += team_.threads()) {
      std::uint32_t n = 0;
      std::uint64_t w = 0;
      for (int k = 0; k < chunk; ++k) {
        n += s_.counts[i * chunk + k];
        w += s_.masses[i * chunk + k];
      }
      s_.chunk_counts[i] = n;
      s_.chunk_masses[i] = w;
    }
    team_.barrier();
    if (team_.thread() == 0) {
      std::uint64_t n = count_before, w = mass_before;
      int at = 0;
      RLK_UNROLL_NOT
      for (int step = 0; step < 2; ++step) {  // finds first the chunk, then the bin: the first one that reaches the
                                              // goal, or the last one with columns
        const std::uint32_t* const counts = step == 0 ? s_.chunk_counts : s_.counts;
        const std::uint64_t* const masses = step == 0 ? s_.chunk_masses : s_.masses;
        const int first = step == 0 ? 0 : at * chunk, end = step == 0 ? kScanChunks : first + chunk;
        std::uint32_t more = 0;
        std::uint64_t heavier = 0;
        at = first;
        RLK_UNROLL_NOT
        for (int i = first; i < end; ++i) {
          if (counts[i] == 0) continue;
          n += more;
          w += heavier;
          at = i;
          more = counts[i];
          heavier = masses[i];
          if (n + more >= count || w + heavier >= mass) break;
        }
      }
      s_.found_prefix = static_cast<std::uint64_t>(at);
      s_.found_rank_before = static_cast<std::uint32_t>(n);
      s_.found_before = w;
      s_.found_count = s_.counts[at];
    }
    team_.barrier();
  }

  // Writes the surviving columns up to rank `end` to the list. listed_ tells whether they fit.
  RLK_DEVICE void collect(std::uint64_t end) {
    if (team_.thread() == 0) s_.listed = 0;
    team_.barrier();
    each_present([&](std::uint64_t rank, float z) {
      if (rank > end || rank > last_ || !survives(z)) return;
      const std::uint32_t at = team_.take(&s_.listed);
      if (at < kListColumns) s_.list[at] = rank;
    });
    team_.barrier();
    list_size_ = s_.listed;
    listed_ = list_size_ <= kListColumns;
  }

  // Writes the mask of the kept columns in the list.
  RLK_DEVICE void mark_listed() const {
    for (std::int64_t i = team_.thread(); i < sample_mask_words(p_.vocab_size); i += team_.threads()) mask_[i] = 0;
    team_.barrier();
    each_listed([&](std::uint64_t rank, float z) {
      if (rank > last_ || !survives(z)) return;
      const std::int64_t bit = mask_bit_of(id_of_rank(rank));
      team_.set_bits(mask_ + bit / 32, 1u << (bit % 32));
    });
    team_.barrier();
  }

  std::uint64_t* const firsts_;
  std::int64_t list_size_ = 0;
  bool listed_ = false;                      // the list holds every column that may be kept
  std::uint64_t from_ = 0, to_ = kLastRank;  // range of ranks of the candidates that each_candidate visits
};

}  // namespace rlk
