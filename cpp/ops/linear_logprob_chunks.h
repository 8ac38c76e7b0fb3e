// How the backward of `linear_logprob` cuts the vocabulary into chunks, and where the gradients of each chunk's logits
// lie.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rows/row_pitch.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk {

constexpr std::int64_t kColumnsTogether = 256;    // chunks of the vocabulary are multiples of this, if possible
constexpr std::int64_t kMostColumns = 24 * 1024;  // wider chunks are not faster

// How a call cuts the vocabulary. `chunk` is the largest number of columns for which the workspace can hold the
// gradients of a block's logits. With `borrows`, a block's hidden states are copied into the memory of its dhidden,
// which leaves more workspace for wider chunks. A separate pass then rounds dhidden. With `lends`, gradients of logits
// lie in the dweight rows of later chunks, as long as those rows have more room than the workspace.
struct Cut {
  std::int64_t chunk;
  bool borrows = false, lends = false;
};

// Columns [first, first + count), and where the gradients of their logits are stored.
struct Chunk {
  std::int64_t first, count;
  bool in_dweight;
};

// Chunks in the workspace have equal widths; otherwise the products of the last chunk would not fill the GPU.
std::vector<Chunk> chunks_of(const LinearLogprobBackwardParams& p, const Cut& cut);

// Offset in dweight at which the gradients of a chunk's logits begin. Their address is a multiple of kWorkspaceAlign.
std::int64_t offset_in_dweight(const LinearLogprobBackwardParams& p, const Chunk& chunk);

}  // namespace rlk
