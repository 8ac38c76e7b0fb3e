// How the copies of embedding's forward are split over threads, shared by CUDA and HIP.
#pragma once

#include "rlk/ops/embedding.h"

namespace rlk {

// How threads copy rows. Rows are copied in units of 16 bytes or of one element. 2^lanes_log2 threads copy a row, or a
// slice of a long row. Each thread copies `count` units at a stride of 2^lanes_log2. If rows are short, a block copies
// several rows.
struct EmbeddingCopyGrid {
  std::uint32_t units, lanes_log2, slices;  // units per row; slices per row (1 if a block can copy a row)
  std::int64_t blocks;
};
inline EmbeddingCopyGrid embedding_copy_grid(const EmbeddingParams& p, int unit_bytes, int count, int threads) {
  EmbeddingCopyGrid g{};
  const std::int64_t units = p.columns * size_of(p.dtype) / unit_bytes;
  g.units = static_cast<std::uint32_t>(units);
  while ((1 << g.lanes_log2) < threads && std::int64_t{count} << g.lanes_log2 < units) ++g.lanes_log2;
  const std::int64_t slice = std::int64_t{count} << g.lanes_log2, rows = threads >> g.lanes_log2;
  g.slices = static_cast<std::uint32_t>((units + slice - 1) / slice);
  g.blocks = (p.num_tokens + rows - 1) / rows * g.slices;
  return g;
}

// The row and the units that a thread copies.
struct EmbeddingCopyPlace {
  std::int64_t token;
  std::uint32_t first, step;  // first unit, and distance to the thread's next unit

  RLK_HD EmbeddingCopyPlace(const EmbeddingCopyGrid& g, std::int64_t block, std::uint32_t thread, std::uint32_t threads,
                            std::uint32_t count) {
    const std::int64_t rows = g.slices == 1 ? block : block / g.slices;
    const std::uint32_t slice = g.slices == 1 ? 0 : static_cast<std::uint32_t>(block - rows * g.slices);
    step = 1u << g.lanes_log2;
    token = rows * (threads >> g.lanes_log2) + (thread >> g.lanes_log2);
    first = slice * step * count + (thread & (step - 1));
  }
};

// The 32 bits that fill a row of y if the table lacks the token's row: zeros, or canonical NaNs of the dtype for a bad
// id. A 16-bit type has two NaNs in 32 bits.
RLK_HD std::uint32_t embedding_fill(DType t, bool is_bad) {
  return !is_bad ? 0 : t == DType::kFloat32 ? 0x7fc00000u : 0x7fff7fffu;
}

}  // namespace rlk
