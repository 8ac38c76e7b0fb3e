// The forward of embedding. HBM bandwidth bounds the kernel: for each token it reads a row of the table and writes a
// row of y.
#pragma once

#include "hip/common/wave.h"
#include "hip/embedding/launches.h"

namespace rlk::hip {

struct alignas(16) Bytes16 {
  std::uint32_t v[4];
};

RLK_DEVICE std::int64_t id_of(const EmbeddingTokens& p, std::int64_t token) {
  const std::int64_t at = p.id_rows.offset(token);
  return p.id_dtype == DType::kInt64 ? global_pointer(static_cast<const std::int64_t*>(p.ids))[at]
                                     : global_pointer(static_cast<const std::int32_t*>(p.ids))[at];
}

RLK_DEVICE void fill(Bytes16& x, std::uint32_t pattern) {
  for (std::uint32_t& word : x.v) word = pattern;
}
template <class Unit>
RLK_DEVICE void fill(Unit& x, std::uint32_t pattern) {
  x = static_cast<Unit>(pattern);
}

template <class Unit>
RLK_DEVICE void embedding_kernel(const EmbeddingParams& p, std::int64_t first_block, const EmbeddingCopyGrid& g) {
  const EmbeddingCopyPlace place(g, first_block + block_id_x(), static_cast<std::uint32_t>(thread_id()), kCopyThreads,
                                 kCopyUnits);
  if (place.token >= p.num_tokens) return;
  const std::int64_t id = id_of(p, place.token), row = embedding_row(p, id);
  const int bytes = size_of(p.dtype);
  auto* to = global_pointer(reinterpret_cast<Unit*>(static_cast<char*>(p.y) + place.token * p.y_stride * bytes));
  Unit x[kCopyUnits];
  if (row < p.num_rows) {
    const auto* from = global_pointer(
        reinterpret_cast<const Unit*>(static_cast<const char*>(p.weight) + row * p.weight_stride * bytes));
#pragma unroll
    for (int i = 0; i < kCopyUnits; ++i) {
      const std::uint32_t at = place.first + i * place.step;
      if (at < g.units) x[i] = from[at];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCopyUnits; ++i) fill(x[i], embedding_fill(p.dtype, embedding_is_bad(p, id)));
  }
#pragma unroll
  for (int i = 0; i < kCopyUnits; ++i) {
    const std::uint32_t at = place.first + i * place.step;
    if (at < g.units) to[at] = x[i];
  }
}

}  // namespace rlk::hip
