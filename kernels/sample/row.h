// One row of sample, computed by a team of threads. This file holds the data that the selection (select.h) and the tree
// (tree.h) share. The code is the same on every backend. A team has
//   Memory              access to the row's arrays (rlk/tokens.h)
//   kLanes              threads that share a leaf: 8, where thread r computes chain r, or 1 for all chains
//   kAhead              columns that a thread loads before it reads any of them
//   kSearchesByZ        whether a search for top_p's cut begins with bins of equal width in z
//   kEdits              whether z may lie in SampleParams::edits, for float32
//   thread(), threads() the number of threads is a multiple of kLanes
//   barrier()           orders accesses to shared memory and to this row's workspace
//   shuffle_xor(x, d)   float or int32 of the lane that differs in d, among kLanes
//   add(to, x), take(counter), set_bits(word, x)    atomic; take returns the earlier count
//   count(word)         atomic, adds one to a word of the row's workspace or output
//   exponential<kExp>(z, c, m)                      2^(c z - m) of rule 4
//   global(pointer)     for loads and stores of the row's arrays
//   own(x)              a separate copy, in each thread, of a value x that is equal in all threads
// Control flow around a barrier or a shuffle is uniform over the team.
#pragma once

#include "kernels/sample/terms.h"
#include "rlk/unroll.h"

namespace rlk {

constexpr int kListColumns = 2048;  // most candidates that the list in shared memory holds
constexpr int kScanChunks = 64;     // chunks of bins in a histogram
constexpr int kMaxTeam = 256;

struct SampleShared {
  std::uint64_t masses[kDigitBins];  // also scratch memory for sums over the team
  std::uint64_t list[kListColumns];  // ranks
  std::uint64_t chunk_masses[kScanChunks];
  std::uint64_t found_prefix, found_before;
  std::uint32_t counts[kDigitBins];
  std::uint32_t chunk_counts[kScanChunks];
  std::uint32_t found_rank_before, found_count, listed;
};

// The result of a row's selection, which the tree reads.
struct alignas(16) SampleState {
  std::uint64_t last, least;
  std::int64_t id;  // a greedy row's token
  float m, q;
  std::uint64_t kept;  // number of kept columns, as counted while the tree is built
  std::int32_t status;
  std::int32_t marked;     // whether the mask describes the kept set; if not, `last` and `least` describe it
  std::int32_t listed;     // for a row of a merge: number of columns in the list of columns and their z
  std::int32_t waits = 0;  // what a row still needs on CUDA (cuda/sample/team.cuh)
  // on CUDA: one more than the number in kept_offsets, if later rows may already use this number; else 0
  std::uint64_t published = 0;
};

// A row's workspace has four words per leaf slot, with a bit for each kept column. After these words come the tree's
// nodes (m, S), and the root is last.
RLK_HD std::int64_t sample_leaf_slots(std::int64_t vocab_size) {
  return std::int64_t{kNumParts} << leaf_height(vocab_size);
}
constexpr int kMaskWords = kLeafColumns / 32;
RLK_HD std::int64_t sample_mask_words(std::int64_t vocab_size) { return kMaskWords * sample_leaf_slots(vocab_size); }
RLK_HD std::int64_t sample_node_floats(std::int64_t vocab_size) { return 4 * sample_leaf_slots(vocab_size); }

// Sets `words` to the presence bits of a leaf's `columns` columns, which begin at column `first`. The bits come from
// `allowed`, the words of a row. All bits are set if `allowed` is null.
template <class Words>
RLK_HD void allowed_in_leaf(Words allowed, std::int64_t first, int columns, std::uint32_t (&words)[kMaskWords]) {
  const std::int64_t at = first / 32, end = (first + columns + 31) / 32;
  const int shift = static_cast<int>(first % 32);
  RLK_UNROLL
  for (int k = 0; k < kMaskWords; ++k) {
    const int left = columns - 32 * k;
    const std::uint32_t valid = left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
    std::uint32_t word = ~0u;
    if (allowed != nullptr && valid != 0) {
      word = static_cast<std::uint32_t>(allowed[at + k]) >> shift;
      if (shift > 0 && at + k + 1 < end) word |= static_cast<std::uint32_t>(allowed[at + k + 1]) << (32 - shift);
    }
    words[k] = word & valid;
  }
}

// Where the z of columns come from: the row's logits, a shard's logits, the list of columns that a merged row keeps, or
// the payloads of round 3.
enum class Columns { kRow, kShard, kListed, kCandidates };
struct ColumnsAt {
  PartRange parts = {0, kNumParts};  // for kShard: the parts of the vocabulary that the shard holds
  // for kListed: entries (id and z) in ascending order of id; SampleState::listed is their number
  const std::uint64_t* listed = nullptr;
  const std::int32_t* candidates = nullptr;  // for kCandidates: the row's payload of the first shard
  std::int64_t candidates_apart = 0;  // for kCandidates: number of words from one shard's payload to the next shard's
  int num_shards = 0;
};
RLK_HD std::uint64_t listed_column(std::int64_t id, float z) {
  return static_cast<std::uint64_t>(id) << 32 | static_cast<std::uint32_t>(bits_of(z));
}

// The data that the selection and the tree share: the row's columns, and which of them are present (valid and allowed).
template <class Team, class T, Exp kExp, Columns kColumns>
class SampleColumns {
 public:
  using Storage = typename T::Storage;

  RLK_DEVICE SampleColumns(const Team& team, const SampleParams& p, std::int64_t row, SampleShared* shared,
                           std::uint32_t* mask, SampleState* state, const ColumnsAt& at)
      : at_(at),
        team_(team),
        p_(p),
        row_(team.own(row)),
        s_(*shared),
        mask_(mask),
        state_(state),
        logits_(team.own(static_cast<const Storage*>(p.logits) + row * p.logits_stride)),
        allowed_(team.own(p.allowed ? p.allowed + row * p.allowed_stride : nullptr)),
        height_(team.own(leaf_height(p.vocab_size))) {}

 protected:
  // Whether SampleParams::edits may hold changed z (edits) for some of the row's columns.
  RLK_DEVICE bool has_edits() const {
    if constexpr (!Team::kEdits || kColumns != Columns::kRow || sizeof(Storage) != sizeof(float)) return false;
    return p_.edited != nullptr;
  }
  // Returns z of column j: its edit if it has one, else its logit `z`. Requires has_edits().
  RLK_DEVICE float edited(std::int64_t j, float z) const { return is_edited(j) ? edit_at(j) : z; }
  RLK_DEVICE bool is_edited(std::int64_t j) const {
    return (p_.edited[row_ * edit_words(p_.vocab_size) + j / 32] >> (j % 32) & 1) != 0;
  }
  RLK_DEVICE float edit_at(std::int64_t j) const { return p_.edits[row_ * p_.vocab_size + j]; }
  RLK_DEVICE bool is_allowed(std::int64_t j) const {
    return allowed_ == nullptr || (static_cast<std::uint32_t>(team_.global(allowed_)[j / 32]) >> (j % 32) & 1) != 0;
  }
  // This object can read columns [first_column(), end_column()).
  RLK_DEVICE std::int64_t first_column() const {
    return kColumns == Columns::kShard ? part_cut(p_.vocab_size, at_.parts.first) : 0;
  }
  RLK_DEVICE std::int64_t end_column() const {
    if constexpr (kColumns != Columns::kShard) return p_.valid_vocab;
    const std::int64_t end = part_cut(p_.vocab_size, at_.parts.first + at_.parts.count);
    return end < p_.valid_vocab ? end : p_.valid_vocab;
  }
  RLK_DEVICE float z_at(std::int64_t j) const {
    if constexpr (kColumns == Columns::kListed) {
      std::int64_t from = 0, to = state_->listed;  // if column j has an entry, the entry is in [from, to)
      RLK_UNROLL_NOT
      while (to - from > 1) {
        const std::int64_t middle = (from + to) / 2;
        const bool before = static_cast<std::int64_t>(team_.global(at_.listed)[middle] >> 32) <= j;
        from = before ? middle : from;
        to = before ? to : middle;
      }
      const std::uint64_t entry = team_.global(at_.listed)[from];
      const float z = float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(entry)));
      return static_cast<std::int64_t>(entry >> 32) == j ? z : -infinity();
    } else {
      const float z = T::load(team_.global(logits_)[j - first_column()]);
      if constexpr (Team::kEdits) return has_edits() ? edited(j, z) : z;
      return z;
    }
  }

  // The mass w_j of the contract, which is a column's probability as an integer that is not normalised.
  RLK_DEVICE std::uint64_t mass_of(float z) const {
    if (z == -infinity()) return 0;
    const float clamped = z > q_ ? z : q_;
    return fixed_mass(team_.template exponential<kExp>(clamped, c_, m_));
  }
  RLK_DEVICE bool survives(float z) const { return least_ == 0 || mass_of(z) >= least_; }

  // Reduces the values of all threads. Every thread gets the result.
  template <class F>
  RLK_DEVICE std::uint64_t reduce(std::uint64_t value, F combine) const {
    team_.barrier();
    s_.masses[team_.thread()] = value;
    team_.barrier();
    for (int half = kMaxTeam; half > 0; half /= 2) {
      if (half < team_.threads()) {
        if (team_.thread() < half && team_.thread() + half < team_.threads()) {
          s_.masses[team_.thread()] = combine(s_.masses[team_.thread()], s_.masses[team_.thread() + half]);
        }
        team_.barrier();
      }
    }
    const std::uint64_t all = s_.masses[0];
    team_.barrier();
    return all;
  }

  // Returns the first column of a leaf slot, and sets *columns to the number of its valid columns. Slots are counted
  // from the first slot of the row or of the shard.
  RLK_DEVICE std::int64_t leaf_first(std::int64_t slot, std::int64_t* columns) const {
    const int part = static_cast<int>(slot >> height_) + (kColumns == Columns::kShard ? at_.parts.first : 0);
    const std::int64_t end =
        part_cut(p_.vocab_size, part + 1) < p_.valid_vocab ? part_cut(p_.vocab_size, part + 1) : p_.valid_vocab;
    const std::int64_t first =
        part_cut(p_.vocab_size, part) + (slot & ((std::int64_t{1} << height_) - 1)) * kLeafColumns;
    const std::int64_t left = end - first;
    *columns = left < 0 ? 0 : left < kLeafColumns ? left : kLeafColumns;
    return first;
  }
  // The index of column j's bit in the mask.
  RLK_DEVICE std::int64_t mask_bit_of(std::int64_t j) const {
    int part = 0;
    while (part + 1 < kNumParts && j >= part_cut(p_.vocab_size, part + 1)) ++part;
    return (std::int64_t{part} << height_) * kLeafColumns + (j - part_cut(p_.vocab_size, part));
  }

  const ColumnsAt at_;
  const Team team_;
  const SampleParams& p_;
  const std::int64_t row_;
  SampleShared& s_;
  std::uint32_t* const mask_;
  SampleState* const state_;
  const Storage* const logits_;
  const std::int32_t* const allowed_;
  const int height_;
  float c_ = 0.0f, m_ = 0.0f, q_ = 0.0f;  // c, m and q of rule 4 (docs/numerics.md) for the row
  std::uint64_t last_ = kLastRank;        // rank of the last kept column
  std::uint64_t least_ = 0;               // least mass of a column that min_p keeps
};

}  // namespace rlk
