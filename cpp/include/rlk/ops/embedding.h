// THE CONTRACT of `embedding`: gathers rows of a table by token ids, and computes the table's gradient.
// Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they show.
//
// Token t has id = ids[t]. The table holds the rows of ids [vocab_start, vocab_start + num_rows), so the token's row is
// v = id - vocab_start:
//   bad    : id < 0 or id >= vocab_size: y is dtype's canonical NaN in every column, and nothing is read
//   owned  : a good id with 0 <= v < num_rows: y[t, k] = weight[v, k] with the same bits, NaNs included
// another rank's: any other good id: y[t, k] = +0. At most one rank of a vocabulary has the row, so the sum of all
//            ranks' y is exact in any order. In this sum, a -0 of the table becomes +0.
// Backward, from dy. The tokens of row v are the owned tokens with this row, except tokens whose id is padding_idx. A
// token with a bad id, another rank's id or padding_idx gives no gradient, and its dy is not read.
//   block  : 8192 tokens by original index (rule 9), in 128 groups of 64. A group is the chain s = fl(s + dy[t, k])
//            over the tokens of row v, ascending, from +0. A perfect binary tree over the groups' index adds the groups
//   dweight[v, k] = fold over the blocks that hold a token of row v, ascending: total = fl(total + block), from +0 or
//                   from main_grad[v, k]. The total is rounded to dweight_dtype last, to nearest even; a NaN becomes
//                   the canonical NaN
//
// A chain that begins at +0 never gives -0, and a tree over such chains never gives -0 either. So a group or a subtree
// without a token of row v may be left out, or be +0, with the same bits. The number of additions then depends on the
// tokens alone, not on the size of the table. A row of dweight without a token is +0; with main_grad such a row is
// neither read nor written.
// A row of y has the same bits for any number of tokens, any position, shape of ids and stride. A row of dweight has
// the same bits for any stride and any shard of the vocabulary, whatever the other ids and rows are. All backends give
// the same bits. All functions enqueue their work on `stream`; they neither allocate nor synchronise. CPU backends
// ignore `stream`, and their backward allocates.
#pragma once

#include <cstdint>

#include "rlk/base.h"

namespace rlk {

constexpr std::int64_t kEmbeddingBlock = 8192;  // tokens per block of rule 9
constexpr int kEmbeddingGroupTokens = 64;
constexpr int kEmbeddingLevels = 7;  // levels of the tree over a block's groups
static_assert(kEmbeddingGroupTokens << kEmbeddingLevels == kEmbeddingBlock);

// The token ids, and the range of ids whose rows this table has.
struct EmbeddingTokens {
  const void* ids = nullptr;       // [num_tokens], id_dtype
  RowLayout id_rows;               // one element per token
  DType id_dtype = DType::kInt64;  // kInt32, kInt64
  std::int64_t num_tokens = 0, num_rows = 0, columns = 0;
  std::int64_t vocab_start = 0;  // >= 0
  std::int64_t vocab_size = 0;   // >= 0; over all ranks. Rows of ids from this size on are padding
};

struct EmbeddingParams : EmbeddingTokens {
  const void* weight = nullptr;    // [num_rows, columns], dtype; columns contiguous, any alignment
  std::int64_t weight_stride = 0;  // elements from row to row
  void* y = nullptr;               // [num_tokens, columns], dtype
  std::int64_t y_stride = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16, kFloat32
};
void embedding(const EmbeddingParams& p, Device device, Stream stream);

struct EmbeddingBackwardParams : EmbeddingTokens {
  const void* dy = nullptr;  // [num_tokens, columns], dtype
  RowLayout dy_rows;
  void* dweight = nullptr;  // [num_rows, columns], dweight_dtype; rows do not overlap
  std::int64_t dweight_stride = 0;
  std::int64_t padding_idx = -1;  // an id, or -1: none
  DType dtype = DType::kBFloat16;
  DType dweight_dtype = DType::kBFloat16;  // dtype or kFloat32
  bool accumulate = false;                 // dweight is main_grad, a float32 array to which the gradient is added
  void* workspace = nullptr;               // embedding_backward_workspace_bytes(...), 16-byte aligned
};
// Up to about columns / 4 + 33 bytes per token and 4 bytes per row on a GPU, else 0.
std::int64_t embedding_backward_workspace_bytes(const EmbeddingBackwardParams& p, Device device);
void embedding_backward(const EmbeddingBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
