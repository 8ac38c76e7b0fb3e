// Every backend checks these preconditions of an embedding call, because a violation would corrupt memory. Users' input
// is checked earlier, by the bindings.
#pragma once

#include "rlk/ops/embedding.h"

namespace rlk {

inline void check_embedding_tokens(const EmbeddingTokens& p) {
  RLK_CHECK(p.num_tokens >= 0 && p.num_tokens < std::int64_t{1} << 32, "embedding: fewer than 2^32 tokens");
  // The sort stores a token's row in 31 bits. One value of these bits marks a token without a row.
  RLK_CHECK(p.num_rows >= 0 && p.num_rows < (std::int64_t{1} << 31) - 1, "embedding: fewer than 2^31 - 1 rows");
  RLK_CHECK(p.columns >= 0 && p.columns < std::int64_t{1} << 31, "embedding: fewer than 2^31 columns");
  RLK_CHECK(p.id_dtype == DType::kInt32 || p.id_dtype == DType::kInt64, "embedding: ids are int32 or int64");
  RLK_CHECK(p.vocab_start >= 0 && p.vocab_size >= 0, "embedding: vocab_start and vocab_size are not negative");
  RLK_CHECK(p.vocab_start <= INT64_MAX - p.num_rows, "embedding: vocab_start + rows is 64 bits");
  RLK_CHECK(p.id_rows.inner > 0, "embedding: row layouts have inner >= 1");
  RLK_CHECK(p.num_tokens == 0 || p.ids, "embedding: ids are given");
}
inline void check_embedding_dtype(DType t) {
  RLK_CHECK(t == DType::kFloat32 || t == DType::kBFloat16 || t == DType::kFloat16,
            "embedding: weight is float32, bfloat16 or float16");
}

inline void check_embedding(const EmbeddingParams& p) {
  check_embedding_tokens(p);
  check_embedding_dtype(p.dtype);
  if (p.num_tokens == 0 || p.columns == 0) return;
  RLK_CHECK(p.y && (p.weight || p.num_rows == 0), "embedding: weight and y are given");
}

inline void check_embedding_backward(const EmbeddingBackwardParams& p) {
  check_embedding_tokens(p);
  check_embedding_dtype(p.dtype);
  RLK_CHECK(p.dweight_dtype == p.dtype || p.dweight_dtype == DType::kFloat32,
            "embedding_backward: dweight has dy's type or float32");
  RLK_CHECK(!p.accumulate || p.dweight_dtype == DType::kFloat32, "embedding_backward: main_grad is float32");
  RLK_CHECK(p.padding_idx >= -1, "embedding_backward: padding_idx is an id or -1");
  if (p.num_rows == 0 || p.columns == 0) return;
  RLK_CHECK(p.dweight, "embedding_backward: dweight is given");
  RLK_CHECK(p.dy_rows.inner > 0, "embedding_backward: row layouts have inner >= 1");
  RLK_CHECK(p.num_tokens == 0 || p.dy, "embedding_backward: dy is given");
}

}  // namespace rlk
