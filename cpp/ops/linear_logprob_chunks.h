// How the backward of linear_logprob cuts the vocabulary, and where the gradients of each chunk's logits lie.
#pragma once

#include <cstdint>
#include <vector>

#include "rlk/ops/linear_logprob.h"

namespace rlk {

constexpr std::int64_t kColumnsTogether = 256;    // chunks of the vocabulary are multiples of this, where they can be
constexpr std::int64_t kMostColumns = 24 * 1024;  // wider chunks gain nothing

// How a call is cut. `chunk`: the most columns whose logits' gradients the workspace holds. `borrows`: a block's hidden
// states are copied into the memory of its dhidden, which leaves the workspace to wider chunks; a pass of its own then
// rounds dhidden. `lends`: gradients of logits lie in dweight, in the rows of later chunks, while those rows have more
// room than the workspace.
struct Cut {
  std::int64_t chunk;
  bool borrows = false, lends = false;
};

// Columns [first, first + count), and where the gradients of their logits are.
struct Chunk {
  std::int64_t first, count;
  bool in_dweight;
};

// In the workspace chunks are as wide as one another, or the last one's products would not fill the GPU.
std::vector<Chunk> chunks_of(const LinearLogprobBackwardParams& p, const Cut& cut);

// Where those of a chunk in dweight begin, from dweight on: a multiple of kWorkspaceAlign as an address.
std::int64_t offset_in_dweight(const LinearLogprobBackwardParams& p, const Chunk& chunk);

}  // namespace rlk
