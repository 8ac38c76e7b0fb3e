// A row of sample by a cluster of eight teams. Each team holds one part of the vocabulary (rule 5) in shared memory, so
// the logits are read once. A team here has, beside the functions of rlk/kernels/sample_row.h,
//   rank()                  the part that this team has
//   cluster_barrier()       orders accesses to every team's shared memory
//   peer(pointer, rank)     the same object in the shared memory of another team
//   sum(x, scratch)         x summed over the team's threads; scratch: a word for each of its warps
//   shuffle_xor(x, d)       for std::uint32_t, too
// The functions of sample_tree.h compute a part's tree, as for a shard of one part.
#pragma once

#include "rlk/kernels/sample_tree.h"

namespace rlk {

constexpr int kClusterBins = 256;    // bins of a search
constexpr int kClusterList = 448;    // candidates that the first team sorts
constexpr int kMostListedK = 400;    // largest top_k whose candidates are listed after one bound
constexpr float kMassRange = 46.0f;  // a column whose exponential is 2^-46 of the largest has no mass

// What a team's threads and the other teams read and write. Its first member serves the reductions of SampleColumns.
struct ClusterShared {
  std::uint64_t sums[kMaxTeam];
  std::uint64_t firsts[kNumParts];  // the first rank of every part, plus one
  float roots[kNumParts][2], raw_roots[kNumParts][2];
  std::uint32_t kept[kNumParts];
  std::uint32_t with_mass[kNumParts];  // columns that may be among the n best
  // Results of the first team, which it writes to every team.
  std::uint64_t last, found_mass_before, goal;
  std::uint32_t bound, found_bin, found_count_before, found_count, is_listed;
  std::uint32_t scratch[kMaxTeam / 32];
  std::uint32_t listed;  // size of the list; the first team alone has one
  std::int32_t status;
  std::int64_t id;  // the row's token, if this team has it, else -1
  union {
    std::uint16_t keys[kNumParts * kMaxTeam];  // every thread's best key; the first team alone has them
    struct {
      std::uint64_t list[kClusterList], sorted[kClusterList];
    };
    struct {
      std::uint32_t bins[4][kClusterBins];  // counts, and masses in three parts of 16 bits
      std::uint64_t merged_masses[kClusterBins];
      std::uint32_t merged_counts[kClusterBins];
    };
  };
};

template <class Team, class T, Exp kExp>
class ClusterRow : RowTree<Team, T, kExp, Columns::kShard> {
  using Base = RowTree<Team, T, kExp, Columns::kShard>;
  using Base::c_, Base::m_, Base::q_, Base::last_, Base::least_, Base::marked_, Base::cuts_;
  using Base::first_column, Base::end_column, Base::is_allowed, Base::z_at, Base::mass_of, Base::survives, Base::reduce;
  using Base::team_, Base::p_, Base::row_, Base::height_, Base::logits_;

 public:
  // p.logits is this part's columns, p.logits_stride is 0. whole: the row in global memory. nodes: a part's share of
  // sample_node_floats(), in shared memory.
  RLK_DEVICE ClusterRow(const Team& team, const SampleParams& p, std::int64_t row, ClusterShared* shared,
                        const typename T::Storage* whole, std::uint32_t* mask, float* nodes)
      : Base(team, p, row, reinterpret_cast<SampleShared*>(shared), mask, nullptr, nodes, {{team.rank(), 1}}),
        s_(*shared),
        whole_(whole) {}

  // Writes the row's results except kept ids, and raw_logprob only if takes_raw. The logits of this part have arrived
  // when it begins to look at them, after wait().
  template <class Wait>
  RLK_DEVICE void run(bool takes_raw, Wait wait) {
    const SampleRow want = sample_row_of<typename Team::Memory>(p_, row_);
    std::int32_t status = want.status;
    if (team_.thread() == 0) {
      s_.listed = 0;
      s_.id = -1;
    }
    wait();  // a barrier, too
    if (status != kOk) return write_failed(status, takes_raw);
    c_ = team_.own(log2_scale(want.temperature));
    std::int64_t first = -1;
    if (want.greedy || want.truncates()) {
      const std::uint64_t rank = first_rank(&status);
      if (status != kOk) return write_failed(status, takes_raw);
      first = id_of_rank(rank);
      if (!want.greedy) truncate(want, z_of_rank(rank));
    }
    cuts_ = last_ != kLastRank || least_ > 0;
    std::int64_t count;
    const SoftmaxStats root = this->template root_of<false>(s_.roots, &count);
    status = status_of(root) | (root.m == -infinity() ? kEmptyRow : kOk);
    if (status != kOk) return write_failed(status, takes_raw);
    if (team_.thread() < 32) {
      const std::int64_t id = want.greedy ? (has(first) ? first : -1) : draw();
      if (team_.thread() == 0 && id >= 0) {
        s_.id = id;
        std::int64_t kept = 0;
        for (int i = 0; i < kNumParts; ++i) kept += s_.kept[i];
        p_.ids[row_] = id;
        p_.status[row_] = status;
        if (p_.logprob != nullptr) p_.logprob[row_] = logprob_outputs(root, z_at(id), want.temperature).logprob;
        if (p_.kept_offsets != nullptr) p_.kept_offsets[row_ + 1] = kept == p_.valid_vocab ? 0 : kept;
      }
    }
    if (p_.top_ids != nullptr) best(p_.top_ids, p_.top_logprobs, root, want.temperature);
    if (!takes_raw) return;
    team_.barrier();
    const float temperature = 1.0f;
    c_ = team_.own(log2_scale(temperature));
    const SoftmaxStats raw = this->template root_of<true>(s_.raw_roots, &count);
    if (team_.thread() == 0 && s_.id >= 0) {
      p_.raw_logprob[row_] = logprob_outputs(raw, z_at(s_.id), temperature).logprob;
    }
    if (p_.raw_top_ids == nullptr) return;
    takes_all_ = true;
    last_ = kLastRank;
    least_ = 0;
    best(p_.raw_top_ids, p_.raw_top_logprobs, raw, temperature);
  }

 private:
  RLK_DEVICE bool has(std::int64_t id) const {
    const std::int64_t next = team_.rank() + 1 < kNumParts ? part_cut(p_.vocab_size, team_.rank() + 1) : p_.vocab_size;
    return id >= first_column() && id < next;
  }
  RLK_DEVICE void write_failed(std::int32_t status, bool takes_raw) const {
    if (team_.rank() != 0 || team_.thread() != 0) return;
    p_.ids[row_] = -1;
    p_.status[row_] = status;
    if (p_.logprob != nullptr) p_.logprob[row_] = canonical_nan();
    if (takes_raw) p_.raw_logprob[row_] = canonical_nan();
    if (p_.kept_offsets != nullptr) p_.kept_offsets[row_ + 1] = 0;
    for (std::int64_t i = 0; p_.top_ids != nullptr && i < p_.n_logprobs; ++i)
      write_best(p_.top_ids, p_.top_logprobs, i);
    for (std::int64_t i = 0; takes_raw && p_.raw_top_ids != nullptr && i < p_.n_logprobs; ++i) {
      write_best(p_.raw_top_ids, p_.raw_top_logprobs, i);
    }
  }
  RLK_DEVICE void write_best(std::int64_t* ids, float* logprobs, std::int64_t place, std::int64_t id = -1,
                             float logprob = canonical_nan()) const {
    ids[row_ * p_.n_logprobs + place] = id;
    logprobs[row_ * p_.n_logprobs + place] = logprob;
  }
  // Writes a value of the first team to every team.
  template <class X>
  RLK_DEVICE void publish(X* to, X x) const {
    if (team_.thread() < kNumParts) *team_.peer(to, team_.thread()) = x;
  }

  // Calls fn(rank, z) for this thread's present columns.
  template <class F>
  RLK_DEVICE void each(F fn) const {
    constexpr int kAhead = 2;
    const std::int64_t first = first_column();
    const int columns = static_cast<int>(end_column() - first);
    RLK_UNROLL_NOT
    for (int base = team_.thread(); base < columns; base += kAhead * team_.threads()) {
      float z[kAhead];
      RLK_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int j = base + i * team_.threads();
        z[i] = T::load(logits_[j < columns ? j : base]);
      }
      RLK_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int j = base + i * team_.threads();
        if (j < columns && (takes_all_ || is_allowed(first + j))) fn(rank_of(z[i], first + j), z[i]);
      }
    }
  }
  // Upper half of z's bits in ascending order.
  static RLK_DEVICE std::uint32_t key_of(std::uint64_t rank) {
    return ~static_cast<std::uint32_t>(rank >> kIdBits) >> 16;
  }

  // The least of all threads' values: ranks plus one, or 0 for a NaN. The first team gets every thread's key.
  RLK_DEVICE std::uint64_t first_of(std::uint64_t mine) {
    const bool has_key = mine != kLastRank && mine != 0;
    team_.peer(s_.keys, 0)[team_.rank() * kMaxTeam + team_.thread()] =
        static_cast<std::uint16_t>(has_key ? key_of(mine - 1) : 0);
    publish(&s_.firsts[team_.rank()], reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }));
    team_.cluster_barrier();
    std::uint64_t first = kLastRank;
    for (int i = 0; i < kNumParts; ++i) first = s_.firsts[i] < first ? s_.firsts[i] : first;
    return first;
  }
  // The first rank of the row, its status, m_ and q_.
  RLK_DEVICE std::uint64_t first_rank(std::int32_t* status) {
    std::uint64_t mine = kLastRank;
    each([&](std::uint64_t rank, float z) {
      const std::uint64_t at = is_nan(z) ? 0 : rank + 1;
      mine = at < mine ? at : mine;
    });
    const std::uint64_t first = first_of(mine);
    SoftmaxStats stats;
    const float z = first == kLastRank ? -infinity() : first == 0 ? canonical_nan() : z_of_rank(first - 1);
    const LeafReference reference = leaf_reference(c_, z, &stats);
    m_ = team_.own(reference.m);
    q_ = team_.own(reference.q);
    *status = reference.usable ? kOk : status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
    return first - 1;
  }

  // Sets last_ and least_. z: of the first rank.
  RLK_DEVICE void truncate(const SampleRow& want, float z) {
    const std::uint64_t min_mass = team_.own(share_of_mass(want.min_p, mass_of(z)));
    if (p_.order == SampleOrder::kVllm) least_ = min_mass;  // otherwise min_p cuts last
    const bool of_all = p_.order == SampleOrder::kSglang;   // top_p's share is of the whole row
    const auto count = static_cast<std::uint64_t>(want.top_k);
    bool counted = want.top_k <= 0 || want.top_k >= p_.valid_vocab, weighed = !(want.top_p < 1.0f);
    if (!counted && want.top_k <= kMostListedK && by_list(count, of_all ? 1.0f : want.top_p)) {
      counted = true;
      weighed = weighed || !of_all;
    }
    const std::uint64_t listed = last_;
    if (of_all) last_ = kLastRank;
    RLK_UNROLL_NOT
    for (int step = 0; step < 2; ++step) {  // one loop, so that the code of a search exists once
      const bool weighs = (step == 0) == of_all;
      if (weighs ? weighed : counted) continue;
      last_ = search(z, weighs ? kLastRank : count, weighs ? want.top_p : 1.0f);
    }
    last_ = listed < last_ ? listed : last_;
    least_ = min_mass;
  }

  // Puts the surviving columns that `in` accepts on the first team's list.
  template <class In>
  RLK_DEVICE void collect(In in) {
    each([&](std::uint64_t rank, float z) {
      if (!in(rank, z) || rank > last_ || !survives(z)) return;
      const std::uint32_t at = team_.take(team_.peer(&s_.listed, 0));
      if (at < kClusterList) team_.peer(s_.list, 0)[at] = rank;
    });
    team_.cluster_barrier();
  }
  // The first team sorts its list; the masses then take the list's place. `size` is at most kClusterList.
  RLK_DEVICE void sort(int size) {
    for (int i = team_.thread(); i < size; i += team_.threads()) {
      const std::uint64_t rank = s_.list[i];
      int place = 0;
      RLK_UNROLL_NOT
      for (int k = 0; k < size; ++k) place += s_.list[k] < rank ? 1 : 0;
      s_.sorted[place] = rank;
    }
    team_.barrier();
    for (int i = team_.thread(); i < size; i += team_.threads()) s_.list[i] = mass_of(z_of_rank(s_.sorted[i]));
    team_.barrier();
  }

  // The largest key that `count` threads reach, or 0.
  RLK_DEVICE std::uint32_t bound_of(std::uint64_t count) {
    if (team_.rank() == 0) {
      std::uint32_t bound = 0;
      RLK_UNROLL_NOT
      for (std::uint32_t bit = 1u << 15; bit > 0; bit /= 2) {
        std::uint32_t mine = 0;
        for (int i = 0; i < kNumParts; ++i) mine += s_.keys[i * kMaxTeam + team_.thread()] >= (bound | bit) ? 1 : 0;
        bound |= team_.sum(mine, s_.scratch) >= count ? bit : 0;
      }
      publish(&s_.bound, bound);
    }
    team_.cluster_barrier();
    return s_.bound;
  }
  // top_k, and then top_p of what it left, by a list of the first columns. Sets last_. Returns whether the list held
  // them; if not, last_ is unchanged.
  RLK_DEVICE bool by_list(std::uint64_t count, float share) {
    const std::uint32_t bound = bound_of(count);
    collect([&](std::uint64_t rank, float) { return key_of(rank) >= bound; });
    if (team_.rank() == 0) {
      const std::uint32_t size = s_.listed;
      const bool holds = size <= kClusterList && (size >= count || bound == 0);
      std::uint64_t last = last_;
      if (holds) {
        sort(static_cast<int>(size));
        const int kept = size < count ? static_cast<int>(size) : static_cast<int>(count);
        if (kept == static_cast<int>(count)) last = s_.sorted[kept - 1];
        if (share < 1.0f) {
          std::uint64_t mine = 0;
          for (int i = team_.thread(); i < kept; i += team_.threads()) mine += s_.list[i];
          const std::uint64_t total = reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; });
          const std::uint64_t of_mass = reaches(kept, 0, 0, kLastRank, share_of_mass(share, total));
          last = of_mass < last ? of_mass : last;
        }
      }
      publish(&s_.last, last);
      publish(&s_.is_listed, holds ? 1u : 0u);
      team_.barrier();
      if (team_.thread() == 0) s_.listed = 0;
    }
    team_.cluster_barrier();
    last_ = team_.own(s_.last);
    return s_.is_listed != 0;
  }
  // The first of `size` sorted ranks up to which there are `count` columns or `mass`; kLastRank if there is none.
  RLK_DEVICE std::uint64_t reaches(int size, std::uint64_t count_before, std::uint64_t mass_before, std::uint64_t count,
                                   std::uint64_t mass) const {
    std::uint64_t n = count_before, w = mass_before;
    RLK_UNROLL_NOT
    for (int i = 0; i < size; ++i) {
      ++n;
      w += s_.list[i];
      if (n >= count || w >= mass) return s_.sorted[i];
    }
    return kLastRank;
  }

  // The rank of the last column of the first `count`, or of the first ones that reach `share` of the mass, among the
  // columns up to last_ that survive. z: the largest. The row is cut into bins by z, then a bin by rank, and so on.
  RLK_DEVICE std::uint64_t search(float z_first, std::uint64_t count, float share) {
    const bool weighs = share < 1.0f;
    const float scale = mul_rn(c_, static_cast<float>(kClusterBins) / kMassRange);
    const auto bin_of_z = [&](float z) {
      const float x = mul_rn(sub_rn(z_first, z), scale);
      return x >= static_cast<float>(kClusterBins - 1) ? kClusterBins - 1 : x > 0.0f ? static_cast<int>(x) : 0;
    };
    const std::uint64_t all = (std::uint64_t{1} << (32 + kIdBits)) - 1;
    std::uint64_t low = 0, high = all, count_before = 0, mass_before = 0, goal = kLastRank;
    int shift = -1, first_bin = -1;  // shift: -1 for bins by z
    RLK_UNROLL_NOT
    for (;;) {
      for (int i = team_.thread(); i < kClusterBins; i += team_.threads()) {
        for (int k = 0; k < 4; ++k) s_.bins[k][i] = 0;
      }
      team_.barrier();
      each([&](std::uint64_t rank, float z) {
        if (rank < low || rank > high || rank > last_ || (first_bin >= 0 && bin_of_z(z) != first_bin)) return;
        const std::uint64_t w = weighs || least_ > 0 ? mass_of(z) : 0;
        if (w < least_) return;
        const int bin = shift < 0 ? bin_of_z(z) : static_cast<int>((rank - low) >> shift);
        team_.add(&s_.bins[0][bin], std::uint32_t{1});
        if (!weighs) return;
        team_.add(&s_.bins[1][bin], static_cast<std::uint32_t>(w & 0xffff));
        team_.add(&s_.bins[2][bin], static_cast<std::uint32_t>(w >> 16 & 0xffff));
        team_.add(&s_.bins[3][bin], static_cast<std::uint32_t>(w >> 32));
      });
      team_.cluster_barrier();
      merge_bins();
      team_.cluster_barrier();
      if (team_.rank() == 0) find_bin(shift < 0 && weighs, share, count, goal, count_before, mass_before);
      team_.cluster_barrier();
      const int bin = static_cast<int>(s_.found_bin);
      count_before = team_.own(std::uint64_t{s_.found_count_before});
      mass_before = team_.own(s_.found_mass_before);
      goal = team_.own(s_.goal);
      const std::uint32_t in_bin = s_.found_count;
      if (shift < 0) {  // bounds of the bin's ranks, one bin wider on both sides
        first_bin = bin;
        const auto edge = [&](int i) { return sub_rn(z_first, div_rn(static_cast<float>(i), scale)); };
        if (bin > 1) low = rank_of(edge(bin - 1), 0);
        if (bin < kClusterBins - 2) high = rank_of(edge(bin + 2), (std::int64_t{1} << kIdBits) - 1);
        if (low > high) low = 0, high = all;
      } else {
        low += static_cast<std::uint64_t>(bin) << shift;
        const std::uint64_t end = low + (std::uint64_t{1} << shift) - 1;
        high = end < high ? end : high;
      }
      if (in_bin <= kClusterList) break;
      shift = 0;
      while ((high - low) >> shift >= kClusterBins) ++shift;
    }
    collect([&](std::uint64_t rank, float z) {
      return rank >= low && rank <= high && (first_bin < 0 || bin_of_z(z) == first_bin);
    });
    if (team_.rank() == 0) {
      const int size = static_cast<int>(s_.listed);
      sort(size);
      publish(&s_.last, reaches(size, count_before, mass_before, count, goal));
      team_.barrier();
      if (team_.thread() == 0) s_.listed = 0;
    }
    team_.cluster_barrier();
    return team_.own(s_.last < last_ ? s_.last : last_);
  }
  // Sums this team's share of the bins over all teams, for the first team.
  RLK_DEVICE void merge_bins() {
    constexpr int kShare = kClusterBins / kNumParts;
    static_assert(kShare * kNumParts == kMaxTeam);
    const int bin = team_.rank() * kShare + team_.thread() / kNumParts, from = team_.thread() % kNumParts;
    std::uint32_t counts = team_.peer(&s_.bins[0][bin], from)[0];
    std::uint64_t mass = std::uint64_t{team_.peer(&s_.bins[1][bin], from)[0]} +
                         (std::uint64_t{team_.peer(&s_.bins[2][bin], from)[0]} << 16) +
                         (std::uint64_t{team_.peer(&s_.bins[3][bin], from)[0]} << 32);
    RLK_UNROLL
    for (int d = 1; d < kNumParts; d *= 2) {
      counts += team_.shuffle_xor(counts, d);
      const std::uint32_t low = team_.shuffle_xor(static_cast<std::uint32_t>(mass), d);
      const std::uint32_t high = team_.shuffle_xor(static_cast<std::uint32_t>(mass >> 32), d);
      mass += std::uint64_t{high} << 32 | low;
    }
    if (from == 0) {
      team_.peer(s_.merged_counts, 0)[bin] = counts;
      team_.peer(s_.merged_masses, 0)[bin] = mass;
    }
  }
  // The first team finds the bin that reaches the goal, else the last one with columns. takes_share: the goal is a
  // share of all bins' mass.
  RLK_DEVICE void find_bin(bool takes_share, float share, std::uint64_t count, std::uint64_t goal,
                           std::uint64_t count_before, std::uint64_t mass_before) {
    if (takes_share) {
      std::uint64_t mine = 0;
      for (int i = team_.thread(); i < kClusterBins; i += team_.threads()) mine += s_.merged_masses[i];
      goal = share_of_mass(share, reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; }));
    }
    std::uint64_t n = count_before, w = mass_before;
    std::uint32_t more = 0;
    std::uint64_t heavier = 0;
    int at = 0;
    RLK_UNROLL_NOT
    for (int i = 0; i < kClusterBins; ++i) {
      if (s_.merged_counts[i] == 0) continue;
      n += more;
      w += heavier;
      at = i;
      more = s_.merged_counts[i];
      heavier = s_.merged_masses[i];
      if (n + more >= count || w + heavier >= goal) break;
    }
    publish(&s_.found_bin, static_cast<std::uint32_t>(at));
    publish(&s_.found_count_before, static_cast<std::uint32_t>(n));
    publish(&s_.found_count, more);
    publish(&s_.found_mass_before, w);
    publish(&s_.goal, goal);
  }

  // The n best of the columns that last_ and least_ keep, by rank; columns without mass follow by id.
  RLK_DEVICE void best(std::int64_t* ids, float* logprobs, const SoftmaxStats& root, float temperature) {
    const auto n = static_cast<std::uint32_t>(p_.n_logprobs);
    if (status_of(root) != kOk || root.m == -infinity()) {
      for (std::int64_t i = team_.thread(); team_.rank() == 0 && i < n; i += team_.threads()) {
        write_best(ids, logprobs, i);
      }
      return;
    }
    std::uint64_t mine = kLastRank;
    std::uint32_t number = 0;
    const auto has_mass = [&](std::uint64_t rank, float z) { return z != -infinity() && rank <= last_ && survives(z); };
    each([&](std::uint64_t rank, float z) {
      if (!has_mass(rank, z)) return;
      mine = rank + 1 < mine ? rank + 1 : mine;
      ++number;
    });
    number = team_.sum(number, s_.scratch);
    publish(&s_.with_mass[team_.rank()], number);
    const std::uint64_t first = first_of(mine);
    std::uint32_t all = 0;
    for (int i = 0; i < kNumParts; ++i) all += s_.with_mass[i];
    const std::uint32_t bound = bound_of(n);
    collect([&](std::uint64_t rank, float z) { return z != -infinity() && key_of(rank) >= bound; });
    if (team_.rank() == 0) {
      const std::uint32_t size = s_.listed;
      publish(&s_.is_listed, size <= kClusterList && (size >= n || size == all) ? 1u : 0u);
      team_.barrier();
      if (team_.thread() == 0 && s_.is_listed == 0) s_.listed = 0;
    }
    team_.cluster_barrier();
    if (s_.is_listed == 0) {
      const std::uint64_t end = search(z_of_rank(first - 1), n, 1.0f);
      collect([&](std::uint64_t rank, float z) { return z != -infinity() && rank <= end; });
    }
    if (team_.rank() == 0) {
      const auto size = static_cast<int>(s_.listed), found = size < static_cast<int>(n) ? size : static_cast<int>(n);
      sort(size);
      for (int i = team_.thread(); i < found; i += team_.threads()) {
        const std::uint64_t rank = s_.sorted[i];
        write_best(ids, logprobs, i, id_of_rank(rank), logprob_outputs(root, z_of_rank(rank), temperature).logprob);
      }
      team_.barrier();
      if (team_.thread() == 0) s_.listed = 0;
      if (found < static_cast<int>(n)) {
        // Fewer than n of the first 2n columns have mass.
        const std::int64_t end = 2 * p_.n_logprobs < p_.valid_vocab ? 2 * p_.n_logprobs : p_.valid_vocab;
        for (std::int64_t j = team_.thread(); j < end; j += team_.threads()) {
          const float z = T::load(whole_[j]);
          s_.keys[j] = (takes_all_ || is_allowed(j)) && has_mass(rank_of(z, j), z) ? 0 : 1;
        }
        team_.barrier();
        for (std::int64_t j = team_.thread(); j < end; j += team_.threads()) {
          if (s_.keys[j] == 0) continue;
          std::int64_t place = found;
          RLK_UNROLL_NOT
          for (std::int64_t i = 0; i < j; ++i) place += s_.keys[i];
          if (place < p_.n_logprobs) {
            write_best(ids, logprobs, place, j, logprob_outputs(root, -infinity(), temperature).logprob);
          }
        }
      }
    }
    team_.cluster_barrier();
  }

  // Root of the row, and the number of columns that this part keeps. `roots`: those of all parts.
  template <bool kRaw>
  RLK_DEVICE SoftmaxStats root_of(float (*roots)[2], std::int64_t* count) {
    const SoftmaxStats own = this->template leaves<kRaw>(count);
    publish(&roots[team_.rank()][0], own.m);
    publish(&roots[team_.rank()][1], own.S);
    if (!kRaw) publish(&s_.kept[team_.rank()], static_cast<std::uint32_t>(*count));
    team_.cluster_barrier();
    return subtree<kNumParts>(roots, 0);
  }
  template <int kCount>
  static RLK_DEVICE SoftmaxStats subtree(const float (*roots)[2], int first) {
    if constexpr (kCount == 1) {
      return {roots[first][0], roots[first][1], 0.0f, 0.0f};
    } else {
      return combine(subtree<kCount / 2>(roots, first), subtree<kCount / 2>(roots, first + kCount / 2));
    }
  }

  // The drawn token if this part has it, else -1. One warp calls this function.
  RLK_DEVICE std::int64_t draw() const {
    const DrawWords<typename Team::Memory> word(p_, row_);
    int part = descend<4>(word, 0, 0);
    part = descend<2>(word, 1, part);
    part = descend<1>(word, 2, part);
    return part == team_.rank() ? Base::draw() : -1;
  }

  // The first part of the drawn half of 2 kHalf parts.
  template <int kHalf, class Word>
  RLK_DEVICE int descend(const Word& word, int depth, int part) const {
    const SoftmaxStats left = subtree<kHalf>(s_.roots, part), right = subtree<kHalf>(s_.roots, part + kHalf);
    return part + (draws_left_node(word(word_of_depth(depth, height_)), left, right) ? 0 : kHalf);
  }

  ClusterShared& s_;
  const typename T::Storage* const whole_;
  bool takes_all_ = false;  // columns that `allowed` forbids, too
};

}  // namespace rlk
