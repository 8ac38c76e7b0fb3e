// Parts of ops/embedding.h that every backend shares: the row of a token, and the sum tree over the tokens of a block.
#pragma once

#include "rlk/ops/embedding.h"

namespace rlk {

RLK_HD std::int64_t embedding_id(const EmbeddingTokens& p, std::int64_t token) {
  const std::int64_t at = p.id_rows.offset(token);
  return p.id_dtype == DType::kInt64 ? static_cast<const std::int64_t*>(p.ids)[at]
                                     : static_cast<const std::int32_t*>(p.ids)[at];
}

RLK_HD bool embedding_is_bad(const EmbeddingTokens& p, std::int64_t id) { return id < 0 || id >= p.vocab_size; }

// The table's row for an id, or num_rows if the table has no row for it.
RLK_HD std::int64_t embedding_row(const EmbeddingTokens& p, std::int64_t id) {
  if (embedding_is_bad(p, id) || id < p.vocab_start || id - p.vocab_start >= p.num_rows) return p.num_rows;
  return id - p.vocab_start;
}
// The row that gets the token's gradient, or num_rows if no row gets it.
RLK_HD std::int64_t embedding_grad_row(const EmbeddingBackwardParams& p, std::int64_t id) {
  return id == p.padding_idx ? p.num_rows : embedding_row(p, id);
}

// The sum tree over a block's groups, for one row of the table. The caller visits the groups that hold a token of the
// row, in ascending order; subtrees without such a token are left out. After each group, advance() adds all subtrees
// that end before the next visited group. `pending` has a bit for each level at which a left subtree waits for its
// right subtree.
struct EmbeddingTree {
  unsigned pending = 0;

  // Returns the level at which the sum of `group` waits, or kEmbeddingLevels at the block's root. `next_group` is the
  // next visited group of the block, or 2^kEmbeddingLevels if there is none. `join(level)` adds the subtree that waits
  // at `level`, as the left operand.
  template <class Join>
  RLK_HD int advance(unsigned group, unsigned next_group, const Join& join) {
    int level = 0;
    // This loop is as fast as code that counts leading zeros, because it ends after few levels for most groups.
    for (unsigned apart = (group ^ next_group) >> 1; apart != 0; apart >>= 1, ++level) {
      if (pending >> level & 1u) join(level);
    }
    pending &= ~0u << level;
    if (level < kEmbeddingLevels) pending |= 1u << level;
    return level;
  }
};

}  // namespace rlk
