#include "cpp/ops/linear_logprob_chunks.h"

#include <algorithm>

#include "cpp/ops/linear_logprob_rows.h"

namespace rlk {
namespace {

std::int64_t dweight_row_bytes(const LinearLogprobBackwardParams& p) {
  return p.head.in_features * size_of(p.dweight_dtype);
}

// The largest number of columns for the next chunk, if `left` columns remain and the gradients of the chunk's logits
// lie in dweight. They must fit into the dweight rows of the columns after the chunk.
std::int64_t most_in_dweight(const LinearLogprobBackwardParams& p, std::int64_t left) {
  const std::int64_t row = dweight_row_bytes(p), column = p.num_rows * size_of(p.head.dtype);
  const std::int64_t most = (left * row - kWorkspaceAlign) / (row + column);
  return std::min(most, kMostColumns) / kColumnsTogether * kColumnsTogether;
}

}  // namespace

std::vector<Chunk> chunks_of(const LinearLogprobBackwardParams& p, const Cut& cut) {
  std::vector<Chunk> chunks;
  std::int64_t first = 0;
  while (cut.lends) {
    const std::int64_t count = most_in_dweight(p, p.num_columns - first);
    if (count <= cut.chunk) break;
    chunks.push_back({first, count, true});
    first += count;
  }
  const std::int64_t left = p.num_columns - first, each = ceil_div(left, ceil_div(left, cut.chunk));
  const std::int64_t even = std::min(cut.chunk, ceil_div(each, kColumnsTogether) * kColumnsTogether);
  for (; first < p.num_columns; first += even) chunks.push_back({first, std::min(even, p.num_columns - first), false});
  return chunks;
}

std::int64_t offset_in_dweight(const LinearLogprobBackwardParams& p, const Chunk& chunk) {
  const auto base = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p.dweight));
  return aligned(base + (chunk.first + chunk.count) * dweight_row_bytes(p)) - base;
}

}  // namespace rlk
