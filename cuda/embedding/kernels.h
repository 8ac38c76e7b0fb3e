// Host entry points of the embedding kernels, one set per architecture, and each kernel's plans. All plans give the
// same bits. embedding.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "kernels/rows/embedding_rows.h"

namespace rlk::cuda {

// A thread copies `vectors` vectors of 16 bytes of a row. If `vectors` is 0 it copies single elements at any alignment.
struct EmbeddingPlan {
  int vectors = 0;
};
constexpr EmbeddingPlan kEmbeddingPlans[] = {{2}, {1}, {0}};
bool serves(const EmbeddingPlan& plan, const EmbeddingParams& p);
EmbeddingPlan choose_plan(const EmbeddingParams& p, int multiprocessors);

// `vectors`: whether every row of dy, dweight and `sums` consists of whole vectors of eight columns at multiples of 16
// bytes.
struct EmbeddingBackwardPlan {
  bool vectors = false;
};
constexpr EmbeddingBackwardPlan kEmbeddingBackwardPlans[] = {{true}, {false}};
bool serves(const EmbeddingBackwardPlan& plan, const EmbeddingBackwardParams& p);

// The sort key of a token of the gradient. The upper half is the token's row, or num_rows if the token has no row. The
// lower half is the token's index.
using EmbeddingKey = std::uint64_t;

constexpr int kEmbeddingRunBits = 9;    // a run: the tokens of one row among 512 consecutive tokens, 8 groups
constexpr int kEmbeddingLongRun = 16;   // runs of at least this many tokens get their own blocks
constexpr int kEmbeddingDigitBits = 9;  // greatest number of row-index bits that one pass sorts by
constexpr int kEmbeddingDigits = 1 << kEmbeddingDigitBits;
constexpr int kEmbeddingSortTile = 2048;  // tokens that a block of the sort takes
constexpr int kEmbeddingItemTile = 1024;
constexpr std::uint32_t kEmbeddingNoSlot = 0xffffffffu;

// A term of a row's sum: a token, or the sum of a long run.
struct alignas(16) EmbeddingItem {
  std::uint32_t row, token;  // token: index of the token, or first of the 512 indices among which a long run lies
  std::uint32_t slot;        // slot of a long run's sum, or kEmbeddingNoSlot
  std::uint32_t unused;
};

// The parts of the workspace.
struct EmbeddingWorkspace {
  EmbeddingKey* keys[2];       // [num_tokens] each
  EmbeddingItem* items;        // [num_tokens]
  std::uint32_t* counts;       // [kEmbeddingDigits, sort tiles]: key counts, then the first position of these keys
  std::uint32_t* item_counts;  // [item tiles]
  std::uint32_t* num_items;
  std::uint8_t* present;  // [num_rows]: 1 where a row has a token
  float* sums;            // [num_tokens / kEmbeddingLongRun + 1, columns]: sums of long runs
};
// Returns the total size of all parts in bytes. Sets the pointers of `to` to the parts of the workspace, unless `to` is
// null.
std::int64_t place(const EmbeddingBackwardParams& p, EmbeddingWorkspace* to);

RLK_CUDA_KERNELS(void embedding(const EmbeddingParams& p, const EmbeddingPlan& plan, cudaStream_t stream);)
RLK_CUDA_KERNELS(void embedding_backward(const EmbeddingBackwardParams& p, const EmbeddingBackwardPlan& plan,
                                         cudaStream_t stream);)

}  // namespace rlk::cuda
