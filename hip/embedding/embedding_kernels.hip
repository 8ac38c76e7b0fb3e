// The kernels of embedding under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and
// for the emulation.
#include "hip/embedding/backward.h"

#define RLK_EMBEDDING_COPIES(shape, Unit)                                                                     \
  RLK_KERNEL(rlk::hip::kCopyThreads)                                                                          \
  rlk_embedding_forward_##shape(rlk::EmbeddingParams p, std::int64_t first_block, rlk::EmbeddingCopyGrid g) { \
    rlk::hip::embedding_kernel<Unit>(p, first_block, g);                                                      \
  }                                                                                                           \
  RLK_KERNEL(rlk::hip::kEmbeddingThreads)                                                                     \
  rlk_embedding_clear_##shape(rlk::EmbeddingBackwardParams p, std::int64_t first_block,                       \
                              rlk::hip::EmbeddingWorkspace w) {                                               \
    rlk::hip::embedding_clear_kernel<Unit>(p, first_block, w);                                                \
  }
#define RLK_EMBEDDING_SORT(source, from_ids)                                                                         \
  RLK_KERNEL(rlk::hip::kSortThreads)                                                                                 \
  rlk_embedding_count_##source(rlk::EmbeddingBackwardParams p, std::int64_t first_block,                             \
                               rlk::hip::EmbeddingWorkspace w, const rlk::hip::EmbeddingKey* keys,                   \
                               rlk::hip::EmbeddingDigit digit, std::int64_t tiles) {                                 \
    rlk::hip::embedding_count_kernel<from_ids>(p, first_block, w, keys, digit, tiles);                               \
  }                                                                                                                  \
  RLK_KERNEL(rlk::hip::kSortThreads)                                                                                 \
  rlk_embedding_scatter_##source(rlk::EmbeddingBackwardParams p, std::int64_t first_block,                           \
                                 rlk::hip::EmbeddingWorkspace w, const rlk::hip::EmbeddingKey* keys,                 \
                                 rlk::hip::EmbeddingKey* sorted, rlk::hip::EmbeddingDigit digit, std::int64_t tiles, \
                                 bool is_last) {                                                                     \
    rlk::hip::embedding_scatter_kernel<from_ids>(p, first_block, w, keys, sorted, digit, tiles, is_last);            \
  }
#define RLK_EMBEDDING_ROWS(type, T, shape, vector)                                               \
  RLK_KERNEL(rlk::hip::kEmbeddingThreads)                                                        \
  rlk_embedding_rows_##shape##_##type(rlk::EmbeddingBackwardParams p, std::int64_t first_block,  \
                                      const rlk::hip::EmbeddingKey* keys, std::int64_t slices) { \
    rlk::hip::embedding_rows_kernel<rlk::hip::T, vector>(p, first_block, keys, slices);          \
  }
#define RLK_EMBEDDING_TYPE(type, T)          \
  RLK_EMBEDDING_ROWS(type, T, vectors, true) \
  RLK_EMBEDDING_ROWS(type, T, elements, false)

RLK_EMBEDDING_COPIES(vectors, rlk::hip::Bytes16)
RLK_EMBEDDING_COPIES(words, std::uint32_t)
RLK_EMBEDDING_COPIES(halves, std::uint16_t)
RLK_EMBEDDING_SORT(ids, true)
RLK_EMBEDDING_SORT(keys, false)
RLK_KERNEL(rlk::hip::kBeginThreads) rlk_embedding_begin(std::uint32_t* counts, std::int64_t num) {
  rlk::hip::embedding_begin_kernel(counts, num);
}
RLK_EMBEDDING_TYPE(bf16, Bf16)
RLK_EMBEDDING_TYPE(f16, Fp16)
RLK_EMBEDDING_TYPE(f32, Fp32)
