// The tree over the columns that a row of sample keeps, and the draw that descends this tree. row.h defines a team.
#pragma once

#include "kernels/sample/row.h"
#include "rlk/math/philox.h"

namespace rlk {

// The random words of a row's token.
template <class Memory>
class DrawWords {
 public:
  RLK_HD DrawWords(const SampleParams& p, std::int64_t row)
      : seed_(static_cast<std::uint64_t>(p.seed.template at<Memory>(row))),
        sample_id_(static_cast<std::uint64_t>(p.sample_id.template at<Memory>(row))),
        position_(static_cast<std::uint32_t>(p.position.template at<Memory>(row))),
        blocks_(static_cast<std::uint32_t>(p.random_stream) * static_cast<std::uint32_t>(kStreamBlocks)) {}
  RLK_HD std::uint32_t operator()(int i) const {
    const PhiloxBlock b = philox_block(seed_, sample_id_, position_, blocks_ + static_cast<std::uint32_t>(i / 4));
    return i & 2 ? (i & 1 ? b.w : b.z) : i & 1 ? b.y : b.x;
  }

 private:
  const std::uint64_t seed_, sample_id_;
  const std::uint32_t position_, blocks_;
};

// Whether a draw at the parent of two nodes goes to the left node.
RLK_HD bool draws_left_node(std::uint32_t word, const SoftmaxStats& left, const SoftmaxStats& right) {
  const SoftmaxStats both = combine(left, right), scaled = combine(left, {both.m, 0.0f, 0.0f, 0.0f});
  return draws_left(word, left.m == -infinity() ? 0.0f : scaled.S, both.S);
}
// The depth, in the whole tree, of the root of a subtree of `count` parts.
RLK_HD int depth_of_parts(int count) { return count == 8 ? 0 : count == 4 ? 1 : count == 2 ? 2 : 3; }

template <class Team, class T, Exp kExp, Columns kColumns = Columns::kRow>
class RowTree : protected SampleColumns<Team, T, kExp, kColumns> {
 protected:
  using Base = SampleColumns<Team, T, kExp, kColumns>;
  using Base::at_, Base::first_column, Base::allowed_, Base::logits_;
  using Base::c_, Base::m_, Base::q_, Base::last_, Base::least_;
  using Base::team_, Base::p_, Base::row_, Base::s_, Base::mask_, Base::state_, Base::height_;
  using Base::z_at, Base::mass_of, Base::survives, Base::reduce, Base::leaf_first;

 public:
  static constexpr int kLanes = Team::kLanes;
  static constexpr int kOwnChains = kNumChains / kLanes;
  static constexpr int kSteps = kLeafColumns / kNumChains;

  RLK_DEVICE RowTree(const Team& team, const SampleParams& p, std::int64_t row, SampleShared* shared,
                     std::uint32_t* mask, SampleState* state, float* nodes, const ColumnsAt& at = {})
      : Base(team, p, row, shared, mask, state, at),
        nodes_(nodes),
        slots_(team.own(kColumns == Columns::kShard ? std::int64_t{at.parts.count} << Base::height_
                                                    : sample_leaf_slots(p.vocab_size))) {}

  // Computes the tree over the kept columns.
  RLK_DEVICE void run_tree() {
    if (state_->status != kOk) return;
    load_state();
    std::int64_t kept;
    const SoftmaxStats root = leaves<false>(&kept);
    if (team_.thread() == 0) {
      state_->status = status_of(root) | (root.m == -infinity() ? kEmptyRow : kOk);
      state_->kept = static_cast<std::uint64_t>(kept);
    }
  }

  // Writes the row's results except kept ids and raw_logprob. *count receives the number of columns that the row keeps,
  // or 0 for all.
  RLK_DEVICE void run_draw(std::int64_t* count) {
    const std::int32_t status = state_->status;
    std::int64_t id = -1;
    float logprob = canonical_nan();
    if (status == kOk) {
      load_state();
      const SampleRow want = sample_row_of<typename Team::Memory>(p_, row_);
      id = want.greedy ? state_->id : draw();
      logprob = logprob_outputs(node(2 * slots_ - 2), z_at(id), want.temperature).logprob;
    }
    if (team_.thread() == 0) {
      const auto kept = static_cast<std::int64_t>(state_->kept);
      team_.global(p_.ids)[row_] = id;
      team_.global(p_.status)[row_] = status;
      if (p_.logprob != nullptr) team_.global(p_.logprob)[row_] = logprob;
      if (count != nullptr) *count = status != kOk || kept == p_.valid_vocab ? 0 : kept;
    }
  }

  // Writes raw_logprob of the id that run_draw() wrote in an earlier launch.
  RLK_DEVICE void run_raw() {
    const std::int64_t id = team_.global(p_.ids)[row_];
    float raw = canonical_nan();
    if (id >= 0) {
      c_ = log2_scale(1.0f);
      std::int64_t all;
      raw = logprob_outputs(leaves<true>(&all), z_at(id), 1.0f).logprob;
    }
    if (team_.thread() == 0) team_.global(p_.raw_logprob)[row_] = raw;
  }

 protected:
  RLK_DEVICE void load_state() {
    c_ = team_.own(log2_scale(sample_row_of<typename Team::Memory>(p_, row_).temperature));
    m_ = team_.own(state_->m);
    q_ = team_.own(state_->q);
    last_ = team_.own(state_->last);
    least_ = team_.own(state_->least);
    marked_ = state_->marked != 0;
    cuts_ = !marked_ && (last_ != kLastRank || least_ > 0);
  }

  // Whether truncation keeps a present column.
  RLK_DEVICE bool is_kept(float z, std::int64_t id) const { return rank_of(z, id) <= last_ && survives(z); }

  // What one thread holds of a leaf: z of the columns of its chains, with -Inf for missing columns, and the sums of
  // these chains.
  struct Leaf {
    float z[kSteps][kOwnChains];
    SoftmaxStats stats;
    float chains[kOwnChains];
  };

  RLK_DEVICE void load_leaf(std::int64_t first, int columns, Leaf* leaf) const {
    const int lane = team_.thread() % kLanes;
    constexpr bool kInMemory = kColumns == Columns::kRow || kColumns == Columns::kShard;
    const auto logits = team_.global(logits_) + (kInMemory && columns > 0 ? first - first_column() : 0);
    RLK_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      RLK_UNROLL
      for (int k = 0; k < kOwnChains; ++k) {
        const int column = i * kNumChains + lane + k;
        if constexpr (kInMemory) {
          leaf->z[i][k] = column < columns ? T::load(logits[column]) : -infinity();
          if constexpr (Team::kEdits) {
            if (this->has_edits() && column < columns) leaf->z[i][k] = this->edited(first + column, leaf->z[i][k]);
          }
        } else {
          leaf->z[i][k] = column < columns ? z_at(first + column) : -infinity();
        }
      }
    }
  }
  // Sets `words` to the bits of the leaf's present columns. The bits come from the mask if it holds the kept set, else
  // from `allowed`. kAll: all valid columns are present.
  template <bool kAll>
  RLK_DEVICE void present_in_leaf(std::int64_t slot, std::int64_t first, int columns,
                                  std::uint32_t (&words)[kMaskWords]) const {
    auto allowed = team_.global(allowed_);
    if (kAll || marked_) allowed = nullptr;
    allowed_in_leaf(allowed, first, columns, words);
    if constexpr (!kAll) {
      RLK_UNROLL
      for (int k = 0; k < kMaskWords; ++k) {
        if (marked_ && words[k] != 0) words[k] &= mask_[slot * kMaskWords + k];
      }
    }
  }
  RLK_DEVICE float lane_sum(const float* chains) const {
    if constexpr (kLanes == 1) {
      return combine_chains(chains);
    } else {
      float sum = chains[0];
      RLK_UNROLL
      for (int d = 1; d < kLanes; d *= 2) sum = add_rn(sum, team_.shuffle_xor(sum, d));
      return sum;
    }
  }
  RLK_DEVICE void sum_leaf(Leaf* leaf) const {
    float largest = -infinity();
    RLK_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      RLK_UNROLL
      for (int k = 0; k < kOwnChains; ++k) largest = larger(largest, leaf->z[i][k]);
    }
    RLK_UNROLL
    for (int d = 1; d < kLanes; d *= 2) largest = larger(largest, team_.shuffle_xor(largest, d));
    const LeafReference reference = leaf_reference(c_, largest, &leaf->stats);
    RLK_UNROLL
    for (int k = 0; k < kOwnChains; ++k) leaf->chains[k] = 0.0f;
    if (reference.usable) {
      RLK_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        RLK_UNROLL
        for (int k = 0; k < kOwnChains; ++k) {
          leaf->chains[k] = add_rn(leaf->chains[k], term(leaf->z[i][k], reference));
        }
      }
    }
    const float sum = lane_sum(leaf->chains);
    if (reference.usable) leaf->stats = {reference.m, sum, 0.0f, 0.0f};
  }
  // The exponential that a column adds to its chain. A missing column adds +0, which changes no sum.
  RLK_DEVICE float term(float z, const LeafReference& reference) const {
    const float clamped = z > reference.q ? z : reference.q;
    const float e = team_.template exponential<kExp>(clamped, c_, reference.m);
    return z == -infinity() ? 0.0f : e;
  }
  static RLK_DEVICE float larger(float a, float b) { return is_nan(a) ? a : is_nan(b) ? b : a > b ? a : b; }

  // Computes the tree over all leaves in nodes_, and sets *count to the number of kept columns. Returns the root. kRaw:
  // the tree covers all valid columns, and no mask is written.
  template <bool kRaw>
  RLK_DEVICE SoftmaxStats leaves(std::int64_t* count) {
    std::uint64_t mine = 0;
    for (int part = 0; part < num_parts(); ++part) mine += leaves_of_part<kRaw>(part);
    *count = kRaw ? p_.valid_vocab : static_cast<std::int64_t>(all_of(mine));
    return join_parts();
  }
  RLK_DEVICE std::int64_t num_parts() const { return slots_ >> height_; }
  RLK_DEVICE std::uint64_t all_of(std::uint64_t mine) const {
    return reduce(mine, [](std::uint64_t a, std::uint64_t b) { return a + b; });
  }
  // Computes the tree of a part up to its root. Parts are counted from the first part of the row or of the shard.
  // Returns how many kept columns this thread has counted.
  template <bool kRaw>
  RLK_DEVICE std::uint64_t leaves_of_part(std::int64_t part) {
    const std::int64_t own = std::int64_t{1} << height_;
    const std::uint64_t mine = leaf_nodes<kRaw>(part << height_, (part + 1) << height_);
    std::int64_t level = 0, size = slots_ / 2;
    for (std::int64_t n = own / 2; n > 0; n /= 2) level = join(level, size, part * n, n), size /= 2;
    return mine;
  }
  // Computes the nodes of leaf slots [begin, end), and writes the masks of their kept columns.
  template <bool kRaw>
  RLK_DEVICE std::uint64_t leaf_nodes(std::int64_t begin, std::int64_t end) {
    const int lane = team_.thread() % kLanes, groups = team_.own(team_.threads() / kLanes);
    std::uint64_t mine = 0;
    end = team_.own(end);
    for (std::int64_t base = team_.own(begin); base < end; base += groups) {
      const std::int64_t slot = base + team_.thread() / kLanes;
      std::uint32_t words[kMaskWords];
      const SoftmaxStats stats = leaf_of_slot<kRaw>(slot, slot < end, words);
      if (!kRaw && lane == 0 && slot < end) {
        const bool writes = (kColumns != Columns::kShard || p_.kept_offsets != nullptr) && !marked_;
        const std::int64_t at = slot + (kColumns == Columns::kShard ? std::int64_t{at_.parts.first} << height_ : 0);
        RLK_UNROLL
        for (int k = 0; k < kMaskWords; ++k) {
          mine += static_cast<std::uint64_t>(set_bits_of(words[k]));
          if (writes) mask_[at * kMaskWords + k] = words[k];
        }
      }
      if (lane == 0 && slot < end) {
        nodes_[2 * slot] = stats.m;
        nodes_[2 * slot + 1] = stats.S;
      }
    }
    team_.barrier();
    return mine;
  }
  // The kLanes threads of a slot compute the statistics of its kept columns, and set `words` to the mask of these
  // columns. `exists` tells whether the slot exists.
  template <bool kRaw>
  RLK_DEVICE SoftmaxStats leaf_of_slot(std::int64_t slot, bool exists, std::uint32_t (&words)[kMaskWords]) const {
    const int lane = team_.thread() % kLanes;
    std::int64_t all = 0, first = 0;
    if (exists) first = leaf_first(slot, &all);
    const auto columns = static_cast<int>(all);
    present_in_leaf<kRaw>(slot, first, columns, words);
    const bool any = (words[0] | words[1] | words[2] | words[3]) != 0;
    Leaf leaf;
    load_leaf(first, any ? columns : 0, &leaf);
    if (!kRaw && (cuts_ || marked_ || allowed_ != nullptr)) {
      std::uint32_t own[kMaskWords] = {};
      RLK_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        RLK_UNROLL
        for (int k = 0; k < kOwnChains; ++k) {
          const int column = i * kNumChains + lane + k;
          const std::uint32_t bit = 1u << (column % 32);
          const bool keeps =
              (words[i * kNumChains / 32] & bit) != 0 && (!cuts_ || is_kept(leaf.z[i][k], first + column));
          if (keeps) own[i * kNumChains / 32] |= bit;
          if (!keeps) leaf.z[i][k] = -infinity();
        }
      }
      if (cuts_) {
        RLK_UNROLL
        for (int k = 0; k < kMaskWords; ++k) {
          auto word = static_cast<std::int32_t>(own[k]);
          RLK_UNROLL
          for (int d = 1; d < kLanes; d *= 2) word |= team_.shuffle_xor(word, d);
          words[k] = static_cast<std::uint32_t>(word);
        }
      }
    }
    sum_leaf(&leaf);
    return leaf.stats;
  }
  // Builds the tree above the parts' roots, and returns its root.
  RLK_DEVICE SoftmaxStats join_parts() {
    std::int64_t size = num_parts() / 2, level = 2 * slots_ - 2 * num_parts();
    for (; size > 0; size /= 2) level = join(level, size, 0, size);
    return node(2 * slots_ - 2);
  }
  // Computes nodes [first, first + count) of a level that has `size` nodes. The next lower level begins at index
  // `level`. Returns the index at which the computed level begins.
  RLK_DEVICE std::int64_t join(std::int64_t level, std::int64_t size, std::int64_t first, std::int64_t count) {
    const std::int64_t above = level + 2 * size;
    for (std::int64_t i = first + team_.thread(); i < first + count; i += team_.threads()) {
      const SoftmaxStats parent = combine(node(level + 2 * i), node(level + 2 * i + 1));
      nodes_[2 * (above + i)] = parent.m;
      nodes_[2 * (above + i) + 1] = parent.S;
    }
    team_.barrier();
    return above;
  }
  RLK_DEVICE SoftmaxStats node(std::int64_t i) const { return {nodes_[2 * i], nodes_[2 * i + 1], 0.0f, 0.0f}; }

  // Draws an id by descending the tree in nodes_.
  RLK_DEVICE std::int64_t draw() const {
    const DrawWords<typename Team::Memory> word(p_, row_);
    // `level` is the index at which a level of the tree begins; `at` counts nodes from there
    std::int64_t at = 0, level = 2 * slots_ - 2, size = 1;
    const int above = kColumns == Columns::kShard ? depth_of_parts(at_.parts.count) : 0;
    for (int depth = above; depth < height_ + 3; ++depth) {
      level -= 2 * size;
      const bool left =
          draws_left_node(word(word_of_depth(depth, height_)), node(level + 2 * at), node(level + 2 * at + 1));
      at = 2 * at + (left ? 0 : 1);
      size *= 2;
    }
    return draw_of_leaf(at, word);
  }

  template <class Word>
  RLK_DEVICE std::int64_t draw_of_leaf(std::int64_t slot, Word word) const {
    std::int64_t all;
    const std::int64_t first = leaf_first(slot, &all);
    const auto columns = static_cast<int>(all);
    const int lane = team_.thread() % kLanes;
    std::uint32_t words[kMaskWords];
    present_in_leaf<false>(slot, first, columns, words);
    Leaf leaf;
    load_leaf(first, columns, &leaf);
    float largest = -infinity();
    RLK_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      RLK_UNROLL
      for (int k = 0; k < kOwnChains; ++k) {
        const int column = i * kNumChains + lane + k;
        const bool keeps =
            (words[i * kNumChains / 32] >> (column % 32) & 1) != 0 && (!cuts_ || is_kept(leaf.z[i][k], first + column));
        if (!keeps) leaf.z[i][k] = -infinity();
        largest = larger(largest, leaf.z[i][k]);
      }
    }
    sum_leaf(&leaf);
    RLK_UNROLL
    for (int d = 1; d < kLanes; d *= 2) largest = larger(largest, team_.shuffle_xor(largest, d));
    SoftmaxStats stats;
    const LeafReference reference = leaf_reference(c_, largest, &stats);
    // Draws a chain of the leaf, by going back through the additions of the chains from the last one. If several lanes
    // share a leaf, drawn[0] tells whether this lane's chain is drawn. If one lane has the whole leaf, drawn[k] tells
    // whether chain k is drawn.
    bool drawn[kOwnChains];
    if constexpr (kLanes == 1) {
      const float* const s = leaf.chains;
      const float half[2] = {add_rn(add_rn(s[0], s[1]), add_rn(s[2], s[3])),
                             add_rn(add_rn(s[4], s[5]), add_rn(s[6], s[7]))};
      int chain = draws_left(word(kChainWord), half[0], add_rn(half[0], half[1])) ? 0 : 4;
      const float pair = add_rn(s[chain], s[chain + 1]);
      chain += draws_left(word(kChainWord + 1), pair, half[chain / 4]) ? 0 : 2;
      chain += draws_left(word(kChainWord + 2), s[chain], add_rn(s[chain], s[chain + 1])) ? 0 : 1;
      for (int k = 0; k < kNumChains; ++k) drawn[k] = k == chain;
    } else {
      const float one = leaf.chains[0], next = team_.shuffle_xor(one, 1), two = add_rn(one, next);
      const float next_two = team_.shuffle_xor(two, 2), four = add_rn(two, next_two);
      const float next_four = team_.shuffle_xor(four, 4), all = add_rn(four, next_four);
      const bool upper_four = (lane & 4) != 0, upper_two = (lane & 2) != 0, upper_one = (lane & 1) != 0;
      drawn[0] = draws_left(word(kChainWord), upper_four ? next_four : four, all) != upper_four &&
                 draws_left(word(kChainWord + 1), upper_two ? next_two : two, four) != upper_two &&
                 draws_left(word(kChainWord + 2), upper_one ? next : one, two) != upper_one;
    }
    // The lane with the drawn chain finds the column. Every other lane gets a larger number, so the minimum is the
    // column.
    std::int32_t column = kLeafColumns;
    const std::uint32_t r = word(kPrefixWord);
    RLK_UNROLL
    for (int k = 0; k < kOwnChains; ++k) {
      float prefix = 0.0f;
      RLK_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        prefix = add_rn(prefix, term(leaf.z[i][k], reference));
        const bool found = drawn[k] && column == kLeafColumns && draws_left(r, prefix, leaf.chains[k]);
        if (found) column = i * kNumChains + lane + k;
      }
    }
    RLK_UNROLL
    for (int d = 1; d < kLanes; d *= 2) {
      const std::int32_t other = team_.shuffle_xor(column, d);
      column = other < column ? other : column;
    }
    return first + column;
  }

  float* const nodes_;
  const std::int64_t slots_;
  bool marked_ = false;
  bool cuts_ = true;  // whether a column is kept must be found by comparison with last_ and least_
};

}  // namespace rlk
