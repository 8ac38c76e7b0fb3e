// Tensor maps of attention's arrays for TMA.
#pragma once

#include "../common/tensor_map.h"
#include "rlk/ops/attention.h"

namespace rlk::cuda {

// Returns the tensor map of q or an array of q's shape (if is_query), or of k, v or their pages (if not). A box has
// `box_tokens` tokens of one head by `box_columns` columns (64 or 32). Columns past the array's last are read as +0.
inline CUtensorMap attention_map(const AttentionInput& p, const AttentionHeads& a, bool is_query, int box_tokens,
                                 int box_columns = 64, std::int64_t columns = 0) {
  if (columns == 0) columns = p.head_dim;
  const bool packed = (is_query ? p.cu_seqlens_q : p.cu_seqlens_k) != nullptr;
  const bool paged = !is_query && p.block_table != nullptr;
  HeadsExtent e;
  e.columns = columns;
  e.heads = is_query ? p.num_q_heads : p.num_kv_heads;
  e.tokens = is_query ? p.q_tokens : paged ? p.page_size : p.k_tokens;
  e.sequences = paged ? p.num_pages : packed ? 1 : p.num_sequences;
  e.head_stride = e.heads > 1 ? a.head_stride : columns;
  e.token_stride = e.tokens > 1 ? a.token_stride : columns;
  e.sequence_stride = e.sequences > 1 ? a.sequence_stride : columns;
  return heads_tensor_map(a.data, p.dtype, e, box_tokens, box_columns * 2);
}

}  // namespace rlk::cuda
