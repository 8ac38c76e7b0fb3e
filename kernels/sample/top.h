// Selects the n best columns of a row for the operator `sample`. Their log-probabilities use the root of a tree that an
// earlier pass computed. That tree is the tree over the kept columns, or the tree of the raw pass. row.h defines a
// team.
#pragma once

#include "kernels/sample/select.h"

namespace rlk {

// kRaw: the params are those of the raw pass. The selection compares ranks and computes no probabilities, so any choice
// of Exp gives the same result.
template <class Team, class T, bool kRaw>
class RowTop : protected RowSelection<Team, T, Exp::kPortable> {
 protected:
  using Base = RowSelection<Team, T, Exp::kPortable>;
  using Base::is_allowed, Base::z_at, Base::mask_bit_of, Base::each_listed, Base::collect, Base::truncate;
  using Base::listed_, Base::list_size_;
  using Base::team_, Base::p_, Base::row_, Base::s_, Base::mask_, Base::state_, Base::last_;

 public:
  // mask, state, firsts and nodes are the row's parts of the workspace. Earlier passes wrote them.
  RLK_DEVICE RowTop(const Team& team, const SampleParams& p, std::int64_t row, SampleShared* shared,
                    std::uint32_t* mask, SampleState* state, std::uint64_t* firsts, const float* nodes)
      : Base(team, p, row, shared, mask, state, firsts), count_(team.own(p.n_logprobs)) {
    const std::int64_t root = 4 * sample_leaf_slots(p.vocab_size) - 4;
    root_ = {nodes[root], nodes[root + 1], 0.0f, 0.0f};
  }

  RLK_DEVICE void run() {
    const SampleRow want = sample_row_of<typename Team::Memory>(p_, row_);
    run_from(!kRaw && (want.greedy || want.truncates()));
  }

 protected:
  // has_firsts: whether an earlier pass stored the threads' first ranks and the id of the first column.
  RLK_DEVICE void run_from(bool has_firsts) {
    if (fails()) return;
    const std::int64_t first = has_firsts ? state_->id : id_of_rank(Base::behind_first() - 1);
    truncate({1.0f, 1.0f, 0.0f, count_, false, kOk}, z_at(first));
    if (!listed_) collect(last_);  // in this case the row has at most n columns in all
    write_listed();
  }
  // Returns whether the row has failed. If the row has failed, the function writes ids of -1 and NaNs.
  RLK_DEVICE bool fails() const {
    if (team_.global(p_.ids)[row_] >= 0 && status_of(root_) == kOk && root_.m != -infinity()) return false;
    write_none();
    return true;
  }
  RLK_DEVICE void write_none() const {
    for (std::int64_t i = team_.thread(); i < count_; i += team_.threads()) write(i, -1, canonical_nan());
  }
  // Writes the first n columns, all of which are in the list.
  RLK_DEVICE void write_listed() {
    temperature_ = kRaw ? 1.0f : sample_row_of<typename Team::Memory>(p_, row_).temperature;
    team_.barrier();  // every thread has read found_count
    if (team_.thread() == 0) s_.found_count = 0;
    team_.barrier();
    // Columns that are kept and finite come first. A column's place is the number of columns with an earlier rank.
    each_listed([&](std::uint64_t rank, float) {
      if (rank > last_ || !has_mass(id_of_rank(rank))) return;
      std::int64_t place = 0;
      RLK_UNROLL_NOT
      for (std::int64_t i = 0; i < list_size_; ++i) place += s_.list[i] < rank ? 1 : 0;
      if (place >= count_) return;
      write(place, id_of_rank(rank), z_at(id_of_rank(rank)));
      team_.take(&s_.found_count);
    });
    team_.barrier();
    if (s_.found_count < count_) fill(s_.found_count);
  }

  // Whether column j is kept and its z is not -Inf.
  RLK_DEVICE bool has_mass(std::int64_t j) const {
    if constexpr (!kRaw) {
      const std::int64_t bit = mask_bit_of(j);
      if ((mask_[bit / 32] >> (bit % 32) & 1) == 0) return false;
    }
    return z_at(j) != -infinity();
  }

  // Appends columns whose mass is 0 after the `found` columns that have a mass, in order of their ids. The function
  // reads the first 2n columns, or all columns of a smaller vocabulary. Fewer than n of these 2n columns have a mass,
  // so at least n of them have none.
  RLK_DEVICE void fill(std::int64_t found) const {
    const std::int64_t end = 2 * count_ < p_.valid_vocab ? 2 * count_ : p_.valid_vocab;
    for (std::int64_t j = team_.thread(); j < end; j += team_.threads()) s_.counts[j] = has_mass(j) ? 0 : 1;
    team_.barrier();
    for (std::int64_t j = team_.thread(); j < end; j += team_.threads()) {
      if (s_.counts[j] == 0) continue;
      std::int64_t place = found;
      RLK_UNROLL_NOT
      for (std::int64_t i = 0; i < j; ++i) place += s_.counts[i];
      if (place < count_) write(place, j, -infinity());
    }
  }

  RLK_DEVICE void write(std::int64_t place, std::int64_t id, float z) const {
    team_.global(p_.top_ids)[row_ * count_ + place] = id;
    team_.global(p_.top_logprobs)[row_ * count_ + place] = logprob_outputs(root_, z, temperature_).logprob;
  }

  const std::int64_t count_;
  SoftmaxStats root_;
  float temperature_ = 1.0f;
};
static_assert(2 * kTopLogprobs <= kDigitBins && kTopLogprobs <= kListColumns);

}  // namespace rlk
