// Splits the rows of an attention call among a GPU's blocks, for the hosts and kernels of CUDA and HIP. A tile holds
// queries of the heads that share a key head, or keys of a key head. A tile is cut at the end of a sequence.
#pragma once

#include "kernels/attention/span.h"

namespace rlk {

inline bool attention_at_16_bytes(const AttentionHeads& a, DType t) {
  const auto aligned = [&](std::int64_t stride) { return stride * size_of(t) % 16 == 0; };
  return reinterpret_cast<std::uintptr_t>(a.data) % 16 == 0 && aligned(a.sequence_stride) && aligned(a.token_stride) &&
         aligned(a.head_stride);
}
// Whether the heads of q, k and v begin at multiples of 16 bytes.
inline bool attention_at_16_bytes(const AttentionInput& p) {
  return attention_at_16_bytes(p.q, p.dtype) && attention_at_16_bytes(p.k, p.dtype) &&
         attention_at_16_bytes(p.v, p.dtype);
}

// The tiles of a launch. A row is a key, or a query in one of the query heads that share a key head. The heads of a
// query are neighbouring rows.
struct AttentionGrid {
  std::int64_t rows;   // rows per sequence; for packed arrays, rows of all sequences
  std::int64_t tiles;  // tiles that cover the rows
  std::int32_t group;  // rows per token
  bool packed;
  bool vectors;  // heads begin at multiples of 16 bytes
};

inline AttentionGrid attention_query_grid(const AttentionInput& p, int rows_of_tile, bool vectors) {
  AttentionGrid g;
  g.group = static_cast<std::int32_t>(p.num_q_heads / p.num_kv_heads);
  g.packed = p.cu_seqlens_q != nullptr;
  g.rows = p.q_tokens * g.group;
  g.tiles = (g.rows + rows_of_tile - 1) / rows_of_tile;
  g.vectors = vectors;
  return g;
}
inline AttentionGrid attention_key_grid(const AttentionInput& p, int rows_of_tile, bool vectors) {
  AttentionGrid g;
  g.group = 1;
  g.packed = p.cu_seqlens_k != nullptr;
  g.rows = p.k_tokens;
  g.tiles = (g.rows + rows_of_tile - 1) / rows_of_tile;
  g.vectors = vectors;
  return g;
}
inline std::int64_t attention_blocks(const AttentionInput& p, const AttentionGrid& g) {
  return g.tiles * p.num_kv_heads * (g.packed ? 1 : p.num_sequences);
}

// The work of a block: rows [first, last) of a key head, in one sequence or in packed arrays. Blocks start with the
// tiles of the last rows, because these tiles take longest under a causal mask.
struct AttentionPlace {
  std::int64_t sequence, kv_head, first, last;

  RLK_HD AttentionPlace(const AttentionInput& p, const AttentionGrid& g, std::int64_t block, int rows_of_tile) {
    const std::int64_t heads = p.num_kv_heads, sequences = g.packed ? 1 : p.num_sequences;
    kv_head = block % heads;
    sequence = block / heads % sequences;
    first = (g.tiles - 1 - block / heads / sequences) * rows_of_tile;
    last = first + rows_of_tile < g.rows ? first + rows_of_tile : g.rows;
  }
};

// The longest part of a block's rows that begins at `first` and lies in one sequence, or outside every sequence.
struct AttentionSegment {
  std::int64_t sequence, last;
  bool exists;

  RLK_HD AttentionSegment(const AttentionInput& p, const AttentionGrid& g, const std::int32_t* offsets,
                          const AttentionPlace& place, std::int64_t first)
      : sequence(place.sequence), last(place.last), exists(true) {
    if (!g.packed) return;
    const std::int64_t token = first / g.group;
    sequence = sequence_of(offsets, p.num_sequences, token);
    exists = sequence < p.num_sequences;
    if (!exists) return;
    std::int64_t end = in_memory(offsets)[sequence + 1];
    if (in_memory(offsets)[sequence] > token) {
      exists = false;
      end = in_memory(offsets)[sequence];
    }
    if (end * g.group < last) last = end * g.group;
  }
};

}  // namespace rlk
