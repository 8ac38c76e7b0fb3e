// A row of sample_partial if the shards exchange payloads in four rounds. A team (row.h) computes the row. Round 1
// gives some ranks of each shard, the splitters, which cut all ranks into bins. Round 2 gives the number and the mass
// of the columns in each bin. Round 3 gives the ranks in the bins in which a cut lies. In these rounds, RowOfRound
// reads the shard's columns. In round 4, RowOfCut finds the rank of the last kept column from the shards' payloads
// alone. After that TreeOfShard builds the tree and draws.
#pragma once

#include "kernels/sample/merge.h"

namespace rlk {

template <class Team, class T, Exp kExp, Columns kColumns>
class RowOfRounds : protected RowSelection<Team, T, kExp, kColumns> {
 protected:
  using Base = RowSelection<Team, T, kExp, kColumns>;
  using Base::c_, Base::m_, Base::q_, Base::least_;
  using Base::find_bin, Base::mass_of, Base::reduce;
  using Base::team_, Base::row_, Base::s_, Base::state_;

 public:
  RLK_DEVICE RowOfRounds(const Team& team, const SamplePartialParams& p, std::int64_t row, SampleShared* shared,
                         std::uint32_t* mask, SampleState* state, std::uint64_t* firsts, const ColumnsAt& at)
      : Base(team, p, row, shared, mask, state, firsts, at),
        p_(p),
        words_(p.payload + row * partial_words(p)),
        want_(sample_row_of<typename Team::Memory>(p, row)),
        cuts_(!want_.greedy && want_.truncates()),
        by_count_(want_.top_k > 0 && want_.top_k < p.valid_vocab),
        by_mass_(want_.top_p < 1.0f) {}

 protected:
  RLK_DEVICE RowPayloads<Team> round(int k) const {
    return {team_, p_, p_.before[k - 1], round_words(k, p_.vocab_size, p_.widest, p_.num_shards), p_.num_shards, row_};
  }
  RLK_DEVICE std::int64_t capacity(int k) const { return round_capacity(k, p_.vocab_size, p_.widest, p_.num_shards); }

  // Returns the row's status, from its parameters and the payloads of earlier rounds. If top_k, top_p or min_p cut the
  // row, the function also sets the row's reference m.
  RLK_DEVICE std::int32_t status() {
    const std::uint32_t tag = payload_tag<typename Team::Memory>(p_, row_, want_);
    RLK_UNROLL_NOT
    for (int k = 1; k < p_.round; ++k) {
      const RowPayloads<Team> of = round(k);
      const std::int32_t known = want_.status | of.word(0, kOfStatus);
      if (!of.fit(known == kOk ? payload_kind(want_, true) : 0, known, p_.takes_raw, tag, capacity(k)))
        return kBadShards;
      if (known != kOk) return known;
    }
    if (want_.status != kOk || p_.round == 1 || !cuts_) return want_.status;
    c_ = team_.own(log2_scale(want_.temperature));
    const RowPayloads<Team> of = round(1);
    std::uint64_t first = kLastRank;
    std::int64_t splitters = 0;
    bool any_nan = false;
    RLK_UNROLL_NOT
    for (int s = 0; s < p_.num_shards; ++s) {
      const float z = of.number(s, kOfFirst + 1);
      const std::int32_t id = of.word(s, kOfFirst);
      any_nan = any_nan || is_nan(z);
      splitters += of.word(s, kOfCount);
      if (id < 0) continue;
      if (!of.owns(s, id)) return kBadShards;
      first = rank_of(z, id) < first ? rank_of(z, id) : first;
    }
    if (splitters >= kRoundBins) return kBadShards;
    SoftmaxStats stats;
    const float z = any_nan ? canonical_nan() : first == kLastRank ? -infinity() : z_of_rank(first);
    const LeafReference reference = leaf_reference(c_, z, &stats);
    m_ = team_.own(reference.m);
    q_ = team_.own(reference.q);
    if (!reference.usable) return status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
    min_mass_ = team_.own(share_of_mass(want_.min_p, mass_of(z)));
    if (p_.order == SampleOrder::kVllm) least_ = min_mass_;  // otherwise min_p cuts last
    return kOk;
  }

  // Writes the head of the payload, which is the same in every round, and sets all other words to 0.
  RLK_DEVICE void write_head(std::int32_t status) const {
    const std::int64_t words = partial_words(p_);
    for (std::int64_t i = team_.thread(); i < words; i += team_.threads()) team_.global(words_)[i] = 0;
    team_.barrier();
    if (team_.thread() != 0) return;
    const auto word = team_.global(words_);
    word[kOfParts] = payload_parts(p_.parts, p_.takes_raw, payload_tag<typename Team::Memory>(p_, row_, want_));
    word[kOfVocab] = static_cast<std::int32_t>(p_.vocab_size);
    word[kOfValid] = static_cast<std::int32_t>(p_.valid_vocab);
    word[kOfStatus] = status;
    word[kOfKind] = status == kOk ? payload_kind(want_, true) : 0;
    word[kOfM] = word[kOfRawM] = bits_of(-infinity());
    word[kOfFirst] = word[kOfDrawn] = -1;
    word[kOfFirst + 1] = bits_of(-infinity());
  }

  // Returns splitter i of a payload of round 1, or candidate i of a payload of round 3. Both are ranks.
  static RLK_DEVICE std::uint64_t rank_in(const RowPayloads<Team>& of, int shard, std::int64_t i) {
    return static_cast<std::uint32_t>(of.word(shard, kPayloadHead + 2 * i)) |
           static_cast<std::uint64_t>(of.word(shard, kPayloadHead + 2 * i + 1)) << 32;
  }
  RLK_DEVICE void write_rank(std::int64_t i, std::uint64_t rank) const {
    team_.global(words_)[kPayloadHead + 2 * i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(rank));
    team_.global(words_)[kPayloadHead + 2 * i + 1] = static_cast<std::int32_t>(rank >> 32);
  }
  // Writes the splitters of all shards to the list in ascending order. kLastRank fills the rest of the list.
  RLK_DEVICE void list_splitters() const {
    const RowPayloads<Team> of = round(1);
    team_.barrier();
    for (int i = team_.thread(); i < kListColumns; i += team_.threads()) s_.list[i] = kLastRank;
    team_.barrier();
    RLK_UNROLL_NOT
    for (int s = 0; s < p_.num_shards; ++s) {
      const std::int64_t count = of.word(s, kOfCount);
      RLK_UNROLL_NOT
      for (std::int64_t i = team_.thread(); i < count; i += team_.threads()) {
        const std::uint64_t rank = rank_in(of, s, i);
        std::int64_t place = i;
        RLK_UNROLL_NOT
        for (int t = 0; t < p_.num_shards; ++t) {
          if (t == s) continue;
          // in [from, to]: how many of shard t's splitters come before `rank`
          std::int64_t from = 0, to = of.word(t, kOfCount);
          RLK_UNROLL_NOT
          while (from < to) {
            const std::int64_t middle = (from + to) / 2;
            const bool before = rank_in(of, t, middle) < rank;
            from = before ? middle + 1 : from;
            to = before ? to : middle;
          }
          place += from;
        }
        s_.list[place] = rank;
      }
    }
    team_.barrier();
  }

  // Bounds for the ranks of two columns, from the counts and masses of all shards. The last column that top_k keeps has
  // a rank in [k_from, k_to). The last column that top_p keeps has a rank in [p_from, p_to).
  struct Cuts {
    std::uint64_t k_from, k_to, p_from, p_to;
    std::uint64_t count_before, mass_before;  // number of columns with ranks before k_from, and their mass
    std::uint64_t p_before;                   // mass of the columns with ranks before p_from
    std::uint64_t total;                      // mass of all columns
  };
  // list_splitters() must run first.
  RLK_DEVICE Cuts find_cuts() const {
    const RowPayloads<Team> of = round(2);
    const auto mass_in = [&](int s, std::int64_t bin) {
      return static_cast<std::uint32_t>(of.word(s, kPayloadHead + kRoundBins + bin)) |
             static_cast<std::uint64_t>(of.word(s, kPayloadHead + 2 * kRoundBins + bin)) << 32;
    };
    std::uint64_t mine = 0;
    RLK_UNROLL_NOT
    for (std::int64_t i = team_.thread(); i < kRoundBins; i += team_.threads()) {
      for (int s = 0; s < p_.num_shards; ++s) mine += mass_in(s, i);
    }
    Cuts cuts = {0, 0, 0, 0, 0, 0, 0, reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; })};
    RLK_UNROLL_NOT
    for (std::int64_t i = team_.thread(); i < kDigitBins; i += team_.threads()) {
      std::uint32_t count = 0;
      std::uint64_t mass = 0;
      for (int s = 0; s < p_.num_shards && i < kRoundBins; ++s) {
        count += static_cast<std::uint32_t>(of.word(s, kPayloadHead + i));
        mass += mass_in(s, i);
      }
      s_.counts[i] = count;
      s_.masses[i] = mass;
    }
    team_.barrier();
    std::uint64_t least_total = cuts.total, most_total = cuts.total;
    if (by_count_) {
      find_bin(kDigitBins, static_cast<std::uint64_t>(want_.top_k), kLastRank, 0, 0);
      cuts.count_before = s_.found_rank_before;
      cuts.mass_before = s_.found_before;
      cuts.k_from = edge(s_.found_prefix);
      cuts.k_to = edge(s_.found_prefix + 1);
      if (p_.order != SampleOrder::kSglang) {
        least_total = cuts.mass_before;
        most_total = cuts.mass_before + s_.masses[s_.found_prefix];
      }
      team_.barrier();
    }
    if (by_mass_) {
      find_bin(kDigitBins, kLastRank, share_of_mass(want_.top_p, least_total), 0, 0);
      cuts.p_before = s_.found_before;
      cuts.p_from = edge(s_.found_prefix);
      team_.barrier();
      find_bin(kDigitBins, kLastRank, share_of_mass(want_.top_p, most_total), 0, 0);
      cuts.p_to = edge(s_.found_prefix + 1);
      team_.barrier();
    }
    return cuts;
  }
  // The first rank of a bin. Bin i has the ranks from splitter i - 1 up to, but excluding, splitter i.
  RLK_DEVICE std::uint64_t edge(std::uint64_t bin) const {
    return bin == 0 ? 0 : bin <= kListColumns ? s_.list[bin - 1] : kLastRank;
  }

  const SamplePartialParams& p_;
  std::int32_t* const words_;
  const SampleRow want_;
  const bool cuts_, by_count_, by_mass_;
  std::uint64_t min_mass_ = 0;
};

// Rounds 1 to 3.
template <class Team, class T, Exp kExp>
class RowOfRound : RowOfRounds<Team, T, kExp, Columns::kShard> {
  using Base = RowOfRounds<Team, T, kExp, Columns::kShard>;
  using Base::by_count_, Base::by_mass_, Base::cuts_, Base::p_, Base::want_, Base::words_;
  using Base::each_present, Base::behind_first, Base::mass_of, Base::survives, Base::is_allowed, Base::z_at;
  using Base::first_column, Base::end_column, Base::list_splitters, Base::find_cuts, Base::write_rank, Base::least_;
  using Base::team_, Base::s_;

 public:
  // scratch: 2 * sorted_columns ranks of this row, in round 1.
  RLK_DEVICE RowOfRound(const Team& team, const SamplePartialParams& p, std::int64_t row, SampleShared* shared,
                        std::uint32_t* mask, SampleState* state, std::uint64_t* firsts, std::uint64_t* scratch)
      : Base(team, p, row, shared, mask, state, firsts, {p.parts, nullptr}), scratch_(scratch) {}

  RLK_DEVICE void run() {
    const std::int32_t status = this->status();
    this->write_head(status);
    if (status != kOk || p_.parts.count == 0) return;
    if (p_.round == 1 && (cuts_ || want_.greedy)) split();
    if (p_.round == 2 && cuts_) count();
    if (p_.round == 3 && cuts_) send();
  }

 private:
  // Round 1: writes the first rank of the shard's present columns, and every step-th of their ranks as splitters.
  RLK_DEVICE void split() {
    const std::uint64_t first = behind_first();
    const auto word = team_.global(words_);
    if (team_.thread() == 0 && first != kLastRank) {
      word[kOfFirst] = first == 0 ? -1 : static_cast<std::int32_t>(id_of_rank(first - 1));
      word[kOfFirst + 1] = payload_float(first == 0 ? canonical_nan() : z_of_rank(first - 1));
    }
    if (!cuts_ || first == 0 || first == kLastRank) return;
    const std::int64_t columns = sort(), step = splitter_step(p_.vocab_size), count = (columns + step - 1) / step;
    const std::uint64_t* const ranks = scratch_ + p_.sorted_columns;
    RLK_UNROLL_NOT
    for (std::int64_t i = team_.thread(); i < count; i += team_.threads()) write_rank(i, ranks[i * step]);
    if (team_.thread() == 0) word[kOfCount] = static_cast<std::int32_t>(count);
  }
  // Sorts the ranks of the present columns into the second half of the scratch memory, and returns their number. Each
  // pass sorts by three bits of z, and the lowest bits come first. The sort needs no pass for ids, because passes are
  // stable and the first pass reads columns in order of their ids.
  RLK_DEVICE std::int64_t sort() {
    constexpr int kBits = 3, kPasses = 11, kDigits = 1 << kBits;
    static_assert(kDigits * kMaxTeam <= kDigitBins && kBits * kPasses >= 32 && kPasses % 2 == 1);
    const int threads = team_.threads();
    std::uint64_t *from = scratch_, *to = scratch_ + p_.sorted_columns;
    std::int64_t count = end_column() - first_column();
    RLK_UNROLL_NOT
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::int64_t share = (count + threads - 1) / threads, begin = team_.thread() * share;
      const std::int64_t end = begin + share < count ? begin + share : count;
      const int shift = kIdBits + kBits * pass;
      const auto each = [&](auto fn) {
        RLK_UNROLL_NOT
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t id = first_column() + i;
          if (pass == 0 && !is_allowed(id)) continue;
          const std::uint64_t rank = pass == 0 ? rank_of(z_at(id), id) : from[i];
          fn(rank, &s_.counts[static_cast<int>(rank >> shift & (kDigits - 1)) * threads + team_.thread()]);
        }
      };
      for (int i = 0; i < kDigits; ++i) s_.counts[i * threads + team_.thread()] = 0;
      each([&](std::uint64_t, std::uint32_t* of_digit) { ++*of_digit; });
      team_.barrier();
      std::uint64_t mine = 0;
      for (int i = 0; i < kDigits; ++i) mine += s_.counts[team_.thread() * kDigits + i];
      std::uint64_t all;
      std::uint64_t before = before_of(mine, &all);
      for (int i = 0; i < kDigits; ++i) {
        const std::uint32_t n = s_.counts[team_.thread() * kDigits + i];
        s_.counts[team_.thread() * kDigits + i] = static_cast<std::uint32_t>(before);
        before += n;
      }
      team_.barrier();
      each([&](std::uint64_t rank, std::uint32_t* of_digit) { to[(*of_digit)++] = rank; });
      team_.barrier();
      count = static_cast<std::int64_t>(all);
      std::uint64_t* const other = from;
      from = to;
      to = other;
    }
    return count;
  }
  // Returns the sum of the values of all earlier threads, and sets *all to the sum over all threads. The function
  // overwrites the list.
  RLK_DEVICE std::uint64_t before_of(std::uint64_t mine, std::uint64_t* all) const {
    std::uint64_t *sums = s_.list, *next = s_.list + kMaxTeam;
    sums[team_.thread()] = mine;
    team_.barrier();
    RLK_UNROLL_NOT
    for (int distance = 1; distance < team_.threads(); distance *= 2) {
      next[team_.thread()] =
          sums[team_.thread()] + (team_.thread() >= distance ? sums[team_.thread() - distance] : std::uint64_t{0});
      team_.barrier();
      std::uint64_t* const other = sums;
      sums = next;
      next = other;
    }
    *all = sums[team_.threads() - 1];
    const std::uint64_t before = sums[team_.thread()] - mine;
    team_.barrier();
    return before;
  }

  // Round 2: counts the surviving columns between neighbouring splitters of all shards. Writes these counts and the
  // columns' masses.
  RLK_DEVICE void count() const {
    list_splitters();
    for (int i = team_.thread(); i < kDigitBins; i += team_.threads()) {
      s_.counts[i] = 0;
      s_.masses[i] = 0;
    }
    team_.barrier();
    each_present([&](std::uint64_t rank, float z) {
      const std::uint64_t w = mass_of(z);
      if (w < least_) return;
      int bin = 0;  // the number of splitters at or before `rank`
      RLK_UNROLL_NOT
      for (int half = kListColumns / 2; half > 0; half /= 2) bin += s_.list[bin + half - 1] <= rank ? half : 0;
      team_.add(&s_.counts[bin], std::uint32_t{1});
      team_.add(&s_.masses[bin], w);
    });
    team_.barrier();
    const auto word = team_.global(words_) + kPayloadHead;
    RLK_UNROLL_NOT
    for (std::int64_t i = team_.thread(); i < kRoundBins; i += team_.threads()) {
      word[i] = static_cast<std::int32_t>(s_.counts[i]);
      word[kRoundBins + i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(s_.masses[i]));
      word[2 * kRoundBins + i] = static_cast<std::int32_t>(s_.masses[i] >> 32);
    }
  }

  // Round 3: writes the ranks of the surviving columns in the bins that contain the cuts, in order of their ids.
  RLK_DEVICE void send() const {
    list_splitters();
    const auto cuts = find_cuts();
    const std::int64_t columns = end_column() - first_column();
    const std::int64_t share = (columns + team_.threads() - 1) / team_.threads(), begin = team_.thread() * share;
    const std::int64_t end = begin + share < columns ? begin + share : columns;
    const auto each = [&](auto fn) {
      RLK_UNROLL_NOT
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t id = first_column() + i;
        if (!is_allowed(id)) continue;
        const float z = z_at(id);
        const std::uint64_t rank = rank_of(z, id);
        const bool of_count = by_count_ && rank >= cuts.k_from && rank < cuts.k_to;
        const bool of_mass = by_mass_ && rank >= cuts.p_from && rank < cuts.p_to;
        if ((of_count || of_mass) && survives(z)) fn(rank);
      }
    };
    std::uint64_t mine = 0, all;
    each([&](std::uint64_t) { ++mine; });
    std::uint64_t place = before_of(mine, &all);
    const bool fits = static_cast<std::int64_t>(all) <= this->capacity(3);
    if (fits) each([&](std::uint64_t rank) { write_rank(static_cast<std::int64_t>(place++), rank); });
    if (team_.thread() == 0) {
      team_.global(words_)[kOfCount] = static_cast<std::int32_t>(fits ? all : 0);
      if (!fits) team_.global(words_)[kOfStatus] = kBadShards;
    }
  }

  std::uint64_t* const scratch_;
};

// The first part of round 4: finds the row's last kept rank and the least mass that min_p keeps. TreeOfShard is the
// second part.
template <class Team, Exp kExp>
class RowOfCut : RowOfRounds<Team, NoLogits, kExp, Columns::kCandidates> {
  using Base = RowOfRounds<Team, NoLogits, kExp, Columns::kCandidates>;
  using Base::by_count_, Base::by_mass_, Base::cuts_, Base::p_, Base::want_, Base::words_, Base::min_mass_;
  using Base::from_, Base::to_, Base::last_, Base::listed_, Base::last_kept, Base::total_mass;
  using Base::m_, Base::q_, Base::team_, Base::row_, Base::state_;

 public:
  RLK_DEVICE RowOfCut(const Team& team, const SamplePartialParams& p, std::int64_t row, SampleShared* shared,
                      std::uint32_t* mask, SampleState* state, std::uint64_t* firsts)
      : Base(team, p, row, shared, mask, state, firsts, candidates_of(p, row)) {}

  RLK_DEVICE void run() {
    const std::int32_t status = this->status();
    this->write_head(status);
    if (status == kOk && cuts_ && (by_count_ || by_mass_)) cut();
    if (team_.thread() != 0) return;
    *state_ = {last_, cuts_ ? min_mass_ : 0, -1, m_, q_, 0, status, 0, 0};
    if (status == kOk && want_.greedy) copy_first();
  }

 private:
  static RLK_DEVICE ColumnsAt candidates_of(const SamplePartialParams& p, std::int64_t row) {
    ColumnsAt at;
    const std::int64_t words = round_words(3, p.vocab_size, p.widest, p.num_shards);
    at.candidates = p.before[2] + row * words;
    at.candidates_apart = p.num_rows * words;
    at.num_shards = p.num_shards;
    return at;
  }

  RLK_DEVICE void cut() {
    this->list_splitters();
    const auto cuts = this->find_cuts();
    std::uint64_t total = cuts.total, of_count = kLastRank;
    if (by_count_) {
      of_count =
          last_between(cuts.k_from, cuts.k_to, static_cast<std::uint64_t>(want_.top_k) - cuts.count_before, kLastRank);
      last_ = of_count;
      if (p_.order != SampleOrder::kSglang) total = team_.own(cuts.mass_before + total_mass());
    }
    if (by_mass_) {
      const std::uint64_t of_mass =
          last_between(cuts.p_from, cuts.p_to, kLastRank, share_of_mass(want_.top_p, total) - cuts.p_before);
      last_ = of_mass < of_count ? of_mass : of_count;
    }
  }
  // Returns the last rank in [from, to) that the cut keeps. last_kept() visits only columns in this range, so its
  // result may be `to` or larger. The function then returns to - 1.
  RLK_DEVICE std::uint64_t last_between(std::uint64_t from, std::uint64_t to, std::uint64_t count, std::uint64_t mass) {
    listed_ = false;
    last_ = kLastRank;
    from_ = from;
    to_ = to;
    const std::uint64_t last = last_kept(count, mass, false);
    return last < to ? last : to - 1;
  }
  // Copies the shard's first rank from the shard's payload of round 1.
  RLK_DEVICE void copy_first() const {
    const RowPayloads<Team> of = this->round(1);
    RLK_UNROLL_NOT
    for (int s = 0; s < p_.num_shards; ++s) {
      const std::int64_t id = of.word(s, kOfFirst);
      const PartRange own = of.parts(s);
      if (own.count == 0 || own.first != p_.parts.first || own.count != p_.parts.count) continue;
      if (id >= 0 && !of.owns(s, id)) continue;
      team_.global(words_)[kOfFirst] = static_cast<std::int32_t>(id);
      team_.global(words_)[kOfFirst + 1] = of.word(s, kOfFirst + 1);
    }
  }
};

}  // namespace rlk
