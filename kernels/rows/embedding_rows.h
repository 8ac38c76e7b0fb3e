// Shared by every backend of ops/embedding.h: a token's row, and its place in the tree of its block.
#pragma once

#include "rlk/ops/embedding.h"

namespace rlk {

RLK_HD std::int64_t embedding_id(const EmbeddingTokens& p, std::int64_t token) {
  const std::int64_t at = p.id_rows.offset(token);
  return p.id_dtype == DType::kInt64 ? static_cast<const std::int64_t*>(p.ids)[at]
                                     : static_cast<const std::int32_t*>(p.ids)[at];
}

RLK_HD bool embedding_is_bad(const EmbeddingTokens& p, std::int64_t id) { return id < 0 || id >= p.vocab_size; }

// The table's row for an id, or num_rows if the table has none.
RLK_HD std::int64_t embedding_row(const EmbeddingTokens& p, std::int64_t id) {
  if (embedding_is_bad(p, id) || id < p.vocab_start || id - p.vocab_start >= p.num_rows) return p.num_rows;
  return id - p.vocab_start;
}
// Likewise for the row that gets the token's gradient.
RLK_HD std::int64_t embedding_grad_row(const EmbeddingBackwardParams& p, std::int64_t id) {
  return id == p.padding_idx ? p.num_rows : embedding_row(p, id);
}

// The tree over a block's groups, for one row. The walk visits only groups that hold a token of the row, ascending, and
// leaves out subtrees without a token. After each group it adds up all subtrees that end before the next visited group.
// `pending` has a bit for each level at which a left subtree waits for the right subtree.
struct EmbeddingTree {
  unsigned pending = 0;

  // Returns the level at which the chain of `group` waits, or kEmbeddingLevels at the block's root. `next_group` lies
  // in the same block, or is 2^kEmbeddingLevels. `join(level)` adds the subtree that waits at `level`, as the left
  // operand.
  template <class Join>
  RLK_HD int advance(unsigned group, unsigned next_group, const Join& join) {
    int level = 0;
    // A count of leading zeros would not be faster, since a group has few levels to climb.
    for (unsigned apart = (group ^ next_group) >> 1; apart != 0; apart >>= 1, ++level) {
      if (pending >> level & 1u) join(level);
    }
    pending &= ~0u << level;
    if (level < kEmbeddingLevels) pending |= 1u << level;
    return level;
  }
};

}  // namespace rlk
