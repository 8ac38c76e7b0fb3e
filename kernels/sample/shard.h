// A row of sample_partial, computed by a team (row.h) for a shard, which is a slice of the vocabulary. The team
// computes the shard's columns of lowest rank, its tree, the draw below the tree's root, and the words for raw_logprob.
// The team writes all of these to the payload that ops/sample.h defines.
#pragma once

#include "kernels/sample/select.h"
#include "kernels/sample/tree.h"

namespace rlk {

// The words of a payload's head.
enum PayloadWord : int {
  kOfParts,
  kOfVocab,
  kOfValid,
  kOfStatus,
  kOfKind,
  kOfM,
  kOfSum,
  kOfRawM,
  kOfRawSum,
  kOfFirst,
  kOfDrawn = kOfFirst + kCandidateWords,
  kOfCount = kOfDrawn + kCandidateWords
};
static_assert(kOfCount + 1 == kPayloadHead);

RLK_HD std::int32_t payload_float(float x) { return bits_of(is_nan(x) ? canonical_nan() : x); }
// Word 0 of a payload: the tag, in which the shard's parts and a flag for raw words replace the lowest 9 bits.
RLK_HD std::int32_t payload_parts(const PartRange& parts, bool takes_raw, std::uint32_t tag) {
  const int held = parts.first + 16 * parts.count + (takes_raw ? 256 : 0);
  return static_cast<std::int32_t>((tag & ~511u) | static_cast<std::uint32_t>(held));
}

// The parameters of a row whose columns are split into shards. The status is bad if shards cannot process the row.
template <class Memory>
RLK_HD SampleRow sharded_row_of(const SampleParams& p, std::int64_t row) {
  SampleRow r = sample_row_of<Memory>(p, row);
  const bool by_mass = r.top_p < 1.0f || r.min_p > 0.0f;
  if ((by_mass && r.top_k == 0) || (r.top_p < 1.0f && p.order == SampleOrder::kSglang)) r.status |= kBadParameter;
  return r;
}
// The payload's tag, which the contract in ops/sample.h defines. Only its upper 23 bits are used.
template <class Memory>
RLK_HD std::uint32_t payload_tag(const SampleParams& p, std::int64_t row, const SampleRow& r) {
  const auto position = static_cast<std::uint64_t>(p.position.template at<Memory>(row));
  const std::uint32_t how = static_cast<std::uint32_t>(p.random_stream) | static_cast<std::uint32_t>(p.order) << 24 |
                            static_cast<std::uint32_t>(p.exp) << 26;
  const PhiloxBlock keys = philox_block(static_cast<std::uint64_t>(p.seed.template at<Memory>(row)),
                                        static_cast<std::uint64_t>(p.sample_id.template at<Memory>(row)),
                                        static_cast<std::uint32_t>(position), how);
  const auto bits = [](float x) { return static_cast<std::uint32_t>(payload_float(x)); };
  return philox4x32({keys.x ^ bits(r.temperature), keys.y ^ bits(r.top_p), keys.z ^ bits(r.min_p),
                     keys.w ^ static_cast<std::uint32_t>(position >> 32)},
                    0, 0)
      .x;
}
RLK_HD std::int32_t payload_kind(const SampleRow& r, bool in_rounds) {
  if (r.greedy || !r.truncates()) return r.greedy ? -1 : 0;
  return static_cast<std::int32_t>(in_rounds ? -2 - (r.top_k < kSampleVocab ? r.top_k : kSampleVocab) : r.top_k);
}
RLK_HD std::int64_t partial_words(const SamplePartialParams& p) {
  return p.round == 0 ? payload_words(p.most_top_k) : round_words(p.round, p.vocab_size, p.widest, p.num_shards);
}

// Writes all words of a payload except those of the tree and the raw words, and stores the status in the row's state.
template <class Team, class T>
class RowOfShard : RowSelection<Team, T, Exp::kPortable, Columns::kShard> {
  using Base = RowSelection<Team, T, Exp::kPortable, Columns::kShard>;
  using Base::collect, Base::truncate, Base::each_listed, Base::behind_first;
  using Base::listed_, Base::list_size_;
  using Base::team_, Base::row_, Base::s_, Base::state_, Base::last_;

 public:
  RLK_DEVICE RowOfShard(const Team& team, const SamplePartialParams& p, std::int64_t row, SampleShared* shared,
                        std::uint32_t* mask, SampleState* state, std::uint64_t* firsts)
      : Base(team, p, row, shared, mask, state, firsts, {p.parts, nullptr}),
        p_(p),
        words_(p.payload + row * partial_words(p)) {}

  RLK_DEVICE void run() {
    const SampleRow want = sharded_row_of<typename Team::Memory>(p_, row_);
    const std::int64_t words = payload_words(p_.most_top_k);
    for (std::int64_t i = team_.thread(); i < words; i += team_.threads()) team_.global(words_)[i] = 0;
    team_.barrier();
    const bool is_read = want.status == kOk && p_.parts.count > 0, ranks = want.greedy || want.truncates();
    std::uint64_t first = kLastRank;
    if (is_read && ranks) first = behind_first();
    if (team_.thread() == 0) {
      const auto word = team_.global(words_);
      word[kOfParts] = payload_parts(p_.parts, p_.takes_raw, payload_tag<typename Team::Memory>(p_, row_, want));
      word[kOfVocab] = static_cast<std::int32_t>(p_.vocab_size);
      word[kOfValid] = static_cast<std::int32_t>(p_.valid_vocab);
      word[kOfStatus] = want.status;
      word[kOfKind] = want.status == kOk ? payload_kind(want, false) : 0;
      word[kOfM] = word[kOfRawM] = bits_of(-infinity());
      const bool is_nan_row = first == 0, is_there = !is_nan_row && first != kLastRank;
      word[kOfFirst] = is_there ? static_cast<std::int32_t>(id_of_rank(first - 1)) : -1;
      word[kOfFirst + 1] = payload_float(is_there ? z_of_rank(first - 1) : is_nan_row ? canonical_nan() : -infinity());
      word[kOfDrawn] = -1;
      *state_ = {kLastRank, 0, -1, 0.0f, 0.0f, 0, want.status, 0, 0};
    }
    if (is_read && !want.greedy && want.truncates() && first != 0 && first != kLastRank) {
      candidates(want.top_k, z_of_rank(first - 1));
    }
  }

 private:
  // Writes the first `count` present columns to the payload, or all of them if there are fewer.
  RLK_DEVICE void candidates(std::int64_t count, float z) {
    truncate({1.0f, 1.0f, 0.0f, count, false, kOk}, z);
    if (!listed_) collect(last_);
    team_.barrier();
    if (team_.thread() == 0) s_.listed = 0;
    team_.barrier();
    each_listed([&](std::uint64_t rank, float of_rank) {
      if (rank > last_) return;
      std::int64_t place = 0;
      RLK_UNROLL_NOT
      for (std::int64_t i = 0; i < list_size_; ++i) place += s_.list[i] < rank ? 1 : 0;
      const auto word = team_.global(words_) + kPayloadHead + place * kCandidateWords;
      word[0] = static_cast<std::int32_t>(id_of_rank(rank));
      word[1] = payload_float(of_rank);
      team_.take(&s_.listed);
    });
    team_.barrier();
    if (team_.thread() == 0) team_.global(words_)[kOfCount] = static_cast<std::int32_t>(s_.listed);
  }

  const SamplePartialParams& p_;
  std::int32_t* const words_;
};

// Writes three parts of a payload: the tree's root, the column that the shard draws, and the raw words of ids that an
// earlier launch found.
template <class Team, class T, Exp kExp>
class TreeOfShard : RowTree<Team, T, kExp, Columns::kShard> {
  using Base = RowTree<Team, T, kExp, Columns::kShard>;
  using Base::c_, Base::z_at, Base::load_state, Base::draw, Base::first_column, Base::end_column;
  using Base::team_, Base::row_, Base::mask_, Base::state_;

 public:
  RLK_DEVICE TreeOfShard(const Team& team, const SamplePartialParams& p, std::int64_t row, SampleShared* shared,
                         std::uint32_t* mask, SampleState* state, float* nodes)
      : Base(team, p, row, shared, mask, state, nodes, {p.parts, nullptr}),
        p_(p),
        words_(p.payload + row * partial_words(p)) {}

  // count: receives the number of columns that the shard keeps, or is null.
  RLK_DEVICE void run_tree(std::int64_t* count) {
    if (!has_tree()) {
      if (count != nullptr && team_.thread() == 0) *count = 0;
      return;
    }
    if (count != nullptr) {
      for (std::int64_t i = team_.thread(); i < sample_mask_words(p_.vocab_size); i += team_.threads()) mask_[i] = 0;
      team_.barrier();
    }
    load_state();
    std::int64_t present;
    const SoftmaxStats root = this->template leaves<false>(&present);
    if (team_.thread() == 0) {
      team_.global(words_)[kOfM] = payload_float(root.m);
      team_.global(words_)[kOfSum] = payload_float(root.S);
      if (count != nullptr) *count = present;
    }
  }
  // Draws a column; must run after run_tree().
  RLK_DEVICE void run_draw() {
    const float m = float_of(team_.global(words_)[kOfM]);
    if (!has_tree() || team_.global(words_)[kOfKind] == -1 || is_nan(m) || m == -infinity()) return;
    load_state();
    const std::int64_t id = draw();
    if (team_.thread() == 0) {
      team_.global(words_)[kOfDrawn] = static_cast<std::int32_t>(id);
      team_.global(words_)[kOfDrawn + 1] = payload_float(z_at(id));
    }
  }

  // Writes the raw words. The object must have the params that raw_pass() returns.
  RLK_DEVICE void run_raw() {
    const auto word = team_.global(words_);
    if (word[kOfStatus] != kOk || p_.parts.count == 0) return;
    c_ = log2_scale(1.0f);
    std::int64_t all;
    const SoftmaxStats root = this->template leaves<true>(&all);
    if (team_.thread() == 0) {
      word[kOfRawM] = payload_float(root.m);
      word[kOfRawSum] = payload_float(root.S);
      copy_raw(kOfFirst);
      copy_raw(kOfDrawn);
    }
    const std::int64_t count = word[kOfCount];
    for (std::int64_t i = team_.thread(); i < count; i += team_.threads()) copy_raw(kPayloadHead + i * kCandidateWords);
  }

 private:
  // Whether this shard computes a tree for the row: the row has no error, and top_k, top_p and min_p cut nothing or cut
  // in rounds.
  RLK_DEVICE bool has_tree() const {
    return p_.parts.count > 0 && team_.global(words_)[kOfStatus] == kOk && team_.global(words_)[kOfKind] <= 0;
  }
  // Writes the raw z of a column. The words from `at` on hold the column's id, z and raw z.
  RLK_DEVICE void copy_raw(std::int64_t at) const {
    const std::int64_t id = team_.global(words_)[at];
    if (id >= 0) team_.global(words_)[at + 2] = payload_float(z_at(id));
  }

  const SamplePartialParams& p_;
  std::int32_t* const words_;
};

}  // namespace rlk
