// Computes a row of sample_merge from the payloads of all shards. A shard is a slice of the vocabulary, and its payload
// is the array that sample_partial wrote for it. A team (row.h) processes one row. If top_k, top_p and min_p cut
// nothing from the row, the team merges the roots of the shards' trees. If these options cut, the payloads hold the
// columns of lowest rank (terms.h) of each shard. The team then selects the kept columns from these, builds the tree
// over them, and draws.
#pragma once

#include "kernels/sample/shard.h"

namespace rlk {

// A dummy for the type of logits: a merge reads no logits.
struct NoLogits {
  using Storage = float;
  static RLK_HD float load(Storage s) { return s; }
};

// The payloads of a row.
template <class Team>
class RowPayloads {
 public:
  RLK_DEVICE RowPayloads(const Team& team, const SampleMergeParams& p, std::int64_t row)
      : RowPayloads(team, p, p.payload, p.in_rounds ? kPayloadHead : payload_words(p.most_top_k), p.num_shards, row) {}
  RLK_DEVICE RowPayloads(const Team& team, const SampleParams& p, const std::int32_t* payloads, std::int64_t words,
                         int num_shards, std::int64_t row)
      : team_(team), p_(p), payloads_(payloads), row_(row), words_(words), num_shards_(num_shards) {}

  RLK_DEVICE std::int32_t word(int shard, std::int64_t at) const {
    return team_.global(payloads_)[(shard * p_.num_rows + row_) * words_ + at];
  }
  RLK_DEVICE float number(int shard, std::int64_t at) const { return float_of(word(shard, at)); }
  RLK_DEVICE PartRange parts(int shard) const {
    const std::int32_t x = word(shard, kOfParts);
    return {x & 15, x >> 4 & 15};
  }
  // Whether an id is one of the valid columns of shard `shard`.
  RLK_DEVICE bool owns(int shard, std::int64_t id) const {
    const PartRange own = parts(shard);
    return id >= part_cut(p_.vocab_size, own.first) && id < part_cut(p_.vocab_size, own.first + own.count) &&
           id < p_.valid_vocab;
  }
  // Whether the payloads belong to this call and together have each part of the vocabulary exactly once. Ids are
  // checked later, when they are read. `most` is the largest count that a payload may have.
  RLK_DEVICE bool fit(std::int32_t kind, std::int32_t status, bool takes_raw, std::uint32_t tag,
                      std::int64_t most) const {
    unsigned covered = 0;
    RLK_UNROLL_NOT
    for (int s = 0; s < num_shards_; ++s) {
      const PartRange own = parts(s);
      const bool power = own.count == 0 || own.count == 1 || own.count == 2 || own.count == 4 || own.count == 8;
      if (word(s, kOfParts) != payload_parts(own, takes_raw, tag) || !power || own.first + own.count > kNumParts)
        return false;
      if (own.count > 0 && own.first % own.count != 0) return false;
      const unsigned these = ((1u << own.count) - 1) << own.first;
      if ((covered & these) != 0) return false;
      covered |= these;
      if (word(s, kOfVocab) != p_.vocab_size || word(s, kOfValid) != p_.valid_vocab || word(s, kOfKind) != kind ||
          word(s, kOfStatus) != status || word(s, kOfCount) < 0 || word(s, kOfCount) > most) {
        return false;
      }
    }
    RLK_UNROLL_NOT
    for (int i = 0; i < kNumParts; ++i) {
      const bool has_columns =
          part_cut(p_.vocab_size, i) < part_cut(p_.vocab_size, i + 1) && part_cut(p_.vocab_size, i) < p_.valid_vocab;
      if (has_columns && (covered >> i & 1) == 0) return false;
    }
    return true;
  }

 private:
  const Team team_;
  const SampleParams& p_;
  const std::int32_t* const payloads_;
  const std::int64_t row_, words_;
  const int num_shards_;
};

// The tree of a row above the shards' roots, in shared memory. Node 1 is the root. Nodes 2 i and 2 i + 1 are the
// children of node i. A single thread uses the tree.
class ShardTree {
 public:
  RLK_HD explicit ShardTree(std::uint32_t* memory) : words_(memory) {}  // `memory` has kWords words

  template <class Payloads>
  RLK_HD void build(const Payloads& of, int num_shards, int word_of_m) const {
    RLK_UNROLL_NOT
    for (int i = 0; i < kNodes; ++i) set(i, identity_stats(), -1);
    RLK_UNROLL_NOT
    for (int s = 0; s < num_shards; ++s) {
      const PartRange own = of.parts(s);
      if (own.count == 0) continue;
      set((kNumParts + own.first) / own.count, {of.number(s, word_of_m), of.number(s, word_of_m + 1), 0.0f, 0.0f}, s);
    }
    RLK_UNROLL_NOT
    for (int i = kNumParts - 1; i > 0; --i) {
      if (owner(i) < 0) set(i, combine(node(2 * i), node(2 * i + 1)), -1);
    }
  }
  RLK_HD SoftmaxStats node(int i) const { return {at(3 * i), at(3 * i + 1), 0.0f, 0.0f}; }
  RLK_HD int owner(int i) const { return static_cast<int>(words_[3 * i + 2]); }  // -1: not the root of a shard
  // Draws at the nodes from the root down, and returns the shard that this path ends in.
  template <class Words>
  RLK_HD int draw(const Words& word) const {
    int i = 1;
    RLK_UNROLL_NOT
    for (int depth = 0; i < kNumParts && owner(i) < 0; ++depth) {
      i = 2 * i + (draws_left_node(word(depth), node(2 * i), node(2 * i + 1)) ? 0 : 1);
    }
    return owner(i);
  }

  static constexpr int kNodes = 2 * kNumParts, kWords = 3 * kNodes;

 private:
  RLK_HD float at(int i) const { return float_of(static_cast<std::int32_t>(words_[i])); }
  RLK_HD void set(int i, const SoftmaxStats& s, int owner) const {
    words_[3 * i] = static_cast<std::uint32_t>(bits_of(s.m));
    words_[3 * i + 1] = static_cast<std::uint32_t>(bits_of(s.S));
    words_[3 * i + 2] = static_cast<std::uint32_t>(owner);
  }
  std::uint32_t* const words_;
};

template <class Team, Exp kExp>
class RowOfMerge : RowSelection<Team, NoLogits, kExp, Columns::kListed> {
  using Base = RowSelection<Team, NoLogits, kExp, Columns::kListed>;
  using Base::c_, Base::m_, Base::q_, Base::last_, Base::least_;
  using Base::each_listed, Base::listed_, Base::list_size_, Base::firsts_;
  using Base::is_allowed, Base::leaf_first, Base::survives, Base::reduce, Base::truncate, Base::mark_listed;
  using Base::team_, Base::row_, Base::s_, Base::mask_, Base::state_;

 public:
  RLK_DEVICE RowOfMerge(const Team& team, const SampleMergeParams& p, std::int64_t row, SampleShared* shared,
                        std::uint32_t* mask, SampleState* state, std::uint64_t* firsts)
      : Base(team, p, row, shared, mask, state, firsts), p_(p), of_(team, p, row) {}

  // Writes the results of a row, except kept ids and the results of a row that is cut, which TreeOfMerge writes. count:
  // receives the number of columns that the row keeps (0 for all), or is null.
  RLK_DEVICE void run(std::int64_t* count) {
    const SampleRow want =
        p_.in_rounds ? sample_row_of<typename Team::Memory>(p_, row_) : sharded_row_of<typename Team::Memory>(p_, row_);
    // A payload's status includes errors of penalties and of parameters. This call can compute only the errors of
    // parameters.
    const std::int32_t known = want.status | of_.word(0, kOfStatus);
    const std::int32_t kind = known == kOk ? payload_kind(want, p_.in_rounds) : 0;
    const std::uint32_t tag = payload_tag<typename Team::Memory>(p_, row_, want);
    if (!of_.fit(kind, known, p_.raw_logprob != nullptr, tag, kind > 0 ? kind : 0)) return fail(kBadShards, count);
    if (known != kOk) return fail(known, count);
    c_ = team_.own(log2_scale(want.temperature));
    kind > 0 ? cut(want, count) : whole(want, count);
  }

 private:
  RLK_DEVICE void fail(std::int32_t status, std::int64_t* count) const {
    if (team_.thread() != 0) return;
    state_->status = status;
    write(-1, status, canonical_nan(), canonical_nan());
    if (count != nullptr) *count = 0;
  }
  RLK_DEVICE void write(std::int64_t id, std::int32_t status, float logprob, float raw) const {
    team_.global(p_.ids)[row_] = id;
    team_.global(p_.status)[row_] = status;
    if (p_.logprob != nullptr) team_.global(p_.logprob)[row_] = logprob;
    if (p_.raw_logprob != nullptr) team_.global(p_.raw_logprob)[row_] = raw;
  }

  // Sets the row's reference m, given the row's largest logit z. Returns the status that follows from z.
  RLK_DEVICE std::int32_t refer_to(float z) {
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c_, z, &stats);
    m_ = team_.own(reference.m);
    q_ = team_.own(reference.q);
    return reference.usable ? kOk : status_of(stats) | (stats.m == -infinity() ? kEmptyRow : kOk);
  }

  // Computes a row that is greedy or not cut.
  RLK_DEVICE void whole(const SampleRow& want, std::int64_t* count) {
    if (team_.thread() == 0) {
      const ShardTree tree(s_.counts);
      tree.build(of_, p_.num_shards, kOfM);
      int shard = -1;
      std::int32_t status = kOk;
      if (want.greedy) {
        status = refer_to(first_shard(&shard));
      } else {
        shard = tree.draw(DrawWords<typename Team::Memory>(p_, row_));
      }
      const SoftmaxStats root = tree.node(1);
      if (status == kOk) status = status_of(root) | (root.m == -infinity() ? kEmptyRow : kOk);
      const int at = want.greedy ? kOfFirst : kOfDrawn;
      const std::int64_t id = shard < 0 ? -1 : of_.word(shard, at);
      if (status == kOk && (shard < 0 || !of_.owns(shard, id))) status = kBadShards;
      float logprob = canonical_nan(), raw = logprob;
      if (status == kOk) {
        logprob = logprob_outputs(root, of_.number(shard, at + 1), want.temperature).logprob;
        if (p_.raw_logprob != nullptr) {
          tree.build(of_, p_.num_shards, kOfRawM);
          raw = logprob_outputs(tree.node(1), of_.number(shard, at + 2), 1.0f).logprob;
        }
      }
      write(status == kOk ? id : -1, status, logprob, raw);
      state_->status = status;
      state_->marked = 0;
    }
    team_.barrier();
    if (count != nullptr) mark_allowed(count);
  }
  // Finds the column with the first rank among all shards. Returns its z, and sets *shard to the shard that holds it.
  // The result is NaN if any shard has a NaN.
  RLK_DEVICE float first_shard(int* shard) const {
    std::uint64_t first = kLastRank;
    RLK_UNROLL_NOT
    for (int s = 0; s < p_.num_shards; ++s) {
      const float z = of_.number(s, kOfFirst + 1);
      if (is_nan(z)) return canonical_nan();
      const std::int32_t id = of_.word(s, kOfFirst);
      if (id < 0 || !of_.owns(s, id) || rank_of(z, id) >= first) continue;
      first = rank_of(z, id);
      *shard = s;
    }
    return first == kLastRank ? -infinity() : z_of_rank(first);
  }
  // Writes the mask of the present columns, and their number to *count.
  RLK_DEVICE void mark_allowed(std::int64_t* count) const {
    std::uint64_t mine = 0;
    const bool is_good = state_->status == kOk && p_.allowed != nullptr;
    for (std::int64_t w = team_.thread(); is_good && w < sample_mask_words(p_.vocab_size); w += team_.threads()) {
      std::int64_t columns;
      const std::int64_t first = leaf_first(w / kMaskWords, &columns), from = w % kMaskWords * 32;
      std::uint32_t word = 0;
      RLK_UNROLL_NOT
      for (std::int64_t i = from; i < from + 32 && i < columns; ++i)
        word |= is_allowed(first + i) ? 1u << (i % 32) : 0u;
      mask_[w] = word;
      mine += static_cast<std::uint64_t>(set_bits_of(word));
    }
    const auto kept = static_cast<std::int64_t>(reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; }));
    if (team_.thread() == 0) *count = kept == p_.valid_vocab ? 0 : kept;
  }

  // Selects the columns that a row keeps, out of the columns in the shards' payloads. The result is a mask and a list.
  RLK_DEVICE void cut(const SampleRow& want, std::int64_t* count) {
    if (team_.thread() == 0) s_.listed = 0;
    team_.barrier();
    std::uint64_t first = kLastRank, before = 0;
    bool any_nan = false;
    RLK_UNROLL_NOT
    for (int s = 0; s < p_.num_shards; ++s) {
      const std::int64_t n = of_.word(s, kOfCount);
      any_nan = any_nan || is_nan(of_.number(s, kOfFirst + 1));
      for (std::int64_t i = team_.thread(); i < n; i += team_.threads()) {
        const std::uint64_t rank = candidate(s, i);
        if (!of_.owns(s, of_.word(s, at(i))) || (i > 0 && rank <= candidate(s, i - 1))) team_.take(&s_.listed);
        s_.list[before + static_cast<std::uint64_t>(i)] = rank;
      }
      if (n > 0) first = candidate(s, 0) < first ? candidate(s, 0) : first;
      before += static_cast<std::uint64_t>(n);
    }
    list_size_ = static_cast<std::int64_t>(before);
    listed_ = true;
    team_.barrier();
    if (s_.listed > 0) return fail(kBadShards, count);
    const std::int32_t status = refer_to(any_nan ? canonical_nan() : before == 0 ? -infinity() : z_of_rank(first));
    if (status != kOk) return fail(status, count);
    truncate(want, z_of_rank(first));
    mark_listed();
    const std::int64_t kept = list_kept();
    if (team_.thread() == 0) *state_ = {last_, least_, -1, m_, q_, 0, kOk, 1, static_cast<std::int32_t>(kept)};
  }
  static RLK_DEVICE std::int64_t at(std::int64_t i) { return kPayloadHead + i * kCandidateWords; }
  RLK_DEVICE std::uint64_t candidate(int shard, std::int64_t i) const {
    return rank_of(of_.number(shard, at(i) + 1), of_.word(shard, at(i)));
  }
  // Writes the kept columns with their z to firsts_, in ascending order of id, and returns their number. A row keeps at
  // most top_k columns here.
  RLK_DEVICE std::int64_t list_kept() const {
    std::uint64_t mine = 0;
    each_listed([&](std::uint64_t rank, float z) {
      if (rank > last_ || !survives(z)) return;
      const std::int64_t id = id_of_rank(rank);
      std::int64_t place = 0;
      RLK_UNROLL_NOT
      for (std::int64_t i = 0; i < list_size_; ++i) {
        const std::uint64_t other = s_.list[i];
        place += other <= last_ && id_of_rank(other) < id && survives(z_of_rank(other)) ? 1 : 0;
      }
      team_.global(firsts_)[place] = listed_column(id, z);
      ++mine;
    });
    return static_cast<std::int64_t>(reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; }));
  }

  const SampleMergeParams& p_;
  const RowPayloads<Team> of_;
};

// Runs after RowOfMerge, for a row that is cut. TreeOfMerge builds the tree over the kept columns, draws, and writes
// the results.
template <class Team, Exp kExp>
class TreeOfMerge : RowTree<Team, NoLogits, kExp, Columns::kListed> {
  using Base = RowTree<Team, NoLogits, kExp, Columns::kListed>;
  using Base::team_, Base::row_, Base::s_, Base::state_;

 public:
  RLK_DEVICE TreeOfMerge(const Team& team, const SampleMergeParams& p, std::int64_t row, SampleShared* shared,
                         std::uint32_t* mask, SampleState* state, const std::uint64_t* firsts, float* nodes)
      : Base(team, p, row, shared, mask, state, nodes, {{0, kNumParts}, firsts}), p_(p), of_(team, p, row) {}

  RLK_DEVICE void run(std::int64_t* count) {
    if (state_->status != kOk || state_->marked == 0) return;
    Base::run_tree();
    team_.barrier();
    Base::run_draw(count);
    if (p_.raw_logprob == nullptr) return;
    team_.barrier();
    const std::int64_t id = team_.global(p_.ids)[row_];
    RLK_UNROLL_NOT
    for (int s = 0; s < p_.num_shards; ++s) {
      const std::int64_t n = of_.word(s, kOfCount);
      for (std::int64_t i = team_.thread(); i < n; i += team_.threads()) {
        const std::int64_t at = kPayloadHead + i * kCandidateWords;
        if (of_.word(s, at) != id) continue;
        const ShardTree tree(s_.counts);
        tree.build(of_, p_.num_shards, kOfRawM);
        team_.global(p_.raw_logprob)[row_] = logprob_outputs(tree.node(1), of_.number(s, at + 2), 1.0f).logprob;
      }
    }
  }

 private:
  const SampleMergeParams& p_;
  const RowPayloads<Team> of_;
};

}  // namespace rlk
