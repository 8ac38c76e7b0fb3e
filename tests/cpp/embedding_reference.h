// A second implementation of embedding, slow and independent of the backends, written from the contract,
// ops/embedding.h. The reference shares only the formats with the backends (linear_reference.h reads and rounds
// patterns).
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "linear_reference.h"
#include "rlk/ops/embedding.h"

namespace embedding_test {

using linear_test::load_pattern;
using linear_test::rounded;
using linear_test::value_of;
using rlk::DType;
using rlk::EmbeddingBackwardParams;
using rlk::EmbeddingParams;
using rlk::EmbeddingTokens;
using rlk::RowLayout;

// Offsets in elements and the patterns that a call writes there.
using Written = std::map<std::int64_t, std::uint32_t>;

inline std::int64_t offset(const RowLayout& rows, std::int64_t row) {
  return row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
}
inline std::int64_t id_of(const EmbeddingTokens& p, std::int64_t token) {
  const std::int64_t at = offset(p.id_rows, token);
  return p.id_dtype == DType::kInt32 ? static_cast<const std::int32_t*>(p.ids)[at]
                                     : static_cast<const std::int64_t*>(p.ids)[at];
}

inline Written reference(const EmbeddingParams& p) {
  Written written;
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    const std::int64_t id = id_of(p, t), row = id - p.vocab_start;
    for (std::int64_t k = 0; k < p.columns; ++k) {
      std::uint32_t& y = written[t * p.y_stride + k];
      if (id < 0 || id >= p.vocab_size) {
        y = p.dtype == DType::kFloat32 ? 0x7fc00000u : 0x7fffu;
      } else if (row >= 0 && row < p.num_rows) {
        y = load_pattern(p.weight, p.dtype, row * p.weight_stride + k);
      } else {
        y = 0;
      }
    }
  }
  return written;
}

// The sum of a block over all its 128 groups and the whole tree, including groups without tokens.
inline float sum_of_block(const EmbeddingBackwardParams& p, std::int64_t block, const std::vector<std::int64_t>& tokens,
                          std::int64_t column) {
  std::vector<float> nodes(128, 0.0f);
  for (const std::int64_t t : tokens) {
    if (t / 8192 != block) continue;
    float& chain = nodes[static_cast<std::size_t>(t % 8192 / 64)];
    chain = chain + value_of(load_pattern(p.dy, p.dtype, offset(p.dy_rows, t) + column), p.dtype);
  }
  while (nodes.size() > 1) {
    for (std::size_t i = 0; 2 * i < nodes.size(); ++i) nodes[i] = nodes[2 * i] + nodes[2 * i + 1];
    nodes.resize(nodes.size() / 2);
  }
  return nodes[0];
}

inline Written reference(const EmbeddingBackwardParams& p) {
  std::map<std::int64_t, std::vector<std::int64_t>> tokens_of;
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    const std::int64_t id = id_of(p, t), row = id - p.vocab_start;
    if (id < 0 || id >= p.vocab_size || id == p.padding_idx || row < 0 || row >= p.num_rows) continue;
    tokens_of[row].push_back(t);
  }
  Written written;
  for (std::int64_t v = 0; v < p.num_rows; ++v) {
    const auto found = tokens_of.find(v);
    if (found == tokens_of.end() && p.accumulate) continue;
    for (std::int64_t k = 0; k < p.columns; ++k) {
      const std::int64_t at = v * p.dweight_stride + k;
      float total = 0.0f;
      // The address may be unaligned.
      if (p.accumulate) std::memcpy(&total, static_cast<const char*>(p.dweight) + 4 * at, 4);
      if (found != tokens_of.end()) {
        std::set<std::int64_t> blocks;
        for (const std::int64_t t : found->second) blocks.insert(t / 8192);
        for (const std::int64_t block : blocks) total = total + sum_of_block(p, block, found->second, k);
      }
      written[at] = rounded(total, p.dweight_dtype);
    }
  }
  return written;
}

}  // namespace embedding_test
