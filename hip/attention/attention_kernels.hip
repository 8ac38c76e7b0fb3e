// The kernels of attention under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and
// for the emulation.
#include "hip/attention/gpu.h"

#define RLK_ATTENTION_FORWARD(pass, Params, width, type, T, Tile)                                     \
  RLK_KERNEL(rlk::kAttentionThreads)                                                                  \
  rlk_attention_##pass##_##width##_##type(Params p, rlk::AttentionGrid g, std::int64_t first_block) { \
    rlk::hip::attention_forward_kernel<rlk::hip::T, rlk::hip::Tile>(p, g, first_block);               \
  }
#define RLK_ATTENTION_GRADIENT(pass, Pass, Params, width, type, T, Tile)                              \
  RLK_KERNEL(rlk::kAttentionThreads)                                                                  \
  rlk_attention_##pass##_##width##_##type(Params p, rlk::AttentionGrid g, std::int64_t first_block) { \
    using OfTile = rlk::Pass<rlk::hip::AttentionGpu, rlk::hip::T, rlk::hip::Tile, Params>;            \
    rlk::hip::attention_gradient_kernel<OfTile>(p, g, first_block);                                   \
  }
#define RLK_ATTENTION_WIDTH(width, type, T, Tile)                                                                  \
  RLK_ATTENTION_FORWARD(forward, rlk::AttentionParams, width, type, T, Tile)                                       \
  RLK_ATTENTION_FORWARD(tree_forward, rlk::AttentionTree<rlk::AttentionParams>, width, type, T, Tile)              \
  RLK_ATTENTION_FORWARD(partials, rlk::AttentionPartialsParams, width, type, T, Tile)                              \
  RLK_ATTENTION_GRADIENT(dq, AttentionQueryGradient, rlk::AttentionBackwardParams, width, type, T, Tile)           \
  RLK_ATTENTION_GRADIENT(tree_dq, AttentionQueryGradient, rlk::AttentionTree<rlk::AttentionBackwardParams>, width, \
                         type, T, Tile)                                                                            \
  RLK_ATTENTION_GRADIENT(dkv, AttentionKeyGradient, rlk::AttentionBackwardParams, width, type, T, Tile)            \
  RLK_ATTENTION_GRADIENT(tree_dkv, AttentionKeyGradient, rlk::AttentionTree<rlk::AttentionBackwardParams>, width,  \
                         type, T, Tile)
#define RLK_ATTENTION_TYPE(type, T)                                                                                   \
  RLK_ATTENTION_WIDTH(narrow, type, T, NarrowTile)                                                                    \
  RLK_ATTENTION_WIDTH(wide, type, T, WideTile)                                                                        \
  RLK_KERNEL(rlk::kAttentionThreads)                                                                                  \
  rlk_attention_merge_##type(rlk::AttentionMergeParams p, std::int64_t first_block, std::int64_t threads) {           \
    const std::int64_t index =                                                                                        \
        (first_block + rlk::hip::block_id_x()) * rlk::kAttentionThreads + rlk::hip::thread_id();                      \
    if (index < threads) rlk::AttentionMergeRow<rlk::hip::AttentionGpu, rlk::hip::T>(p, index).run();                 \
  }                                                                                                                   \
  RLK_KERNEL(rlk::kAttentionThreads)                                                                                  \
  rlk_attention_delta_##type(rlk::AttentionBackwardParams p, std::int64_t first_block, std::int64_t rows,             \
                             std::int64_t blocks) {                                                                   \
    rlk::attention_delta<rlk::hip::AttentionGpu, rlk::hip::T>(p, rows, first_block + rlk::hip::block_id_x(), blocks); \
  }

RLK_KERNEL(rlk::kAttentionThreads)
rlk_attention_paths(rlk::AttentionInput p, std::int64_t, std::uint32_t* table) {
  rlk::make_attention_paths<rlk::hip::AttentionGpu>(p, table);
}

RLK_KERNEL(rlk::kAttentionThreads)
rlk_attention_blank(rlk::AttentionPartialsParams p, std::int64_t first_block, std::int64_t threads) {
  const std::int64_t index = (first_block + rlk::hip::block_id_x()) * rlk::kAttentionThreads + rlk::hip::thread_id();
  if (index < threads) rlk::attention_partial_blank(p, index);
}

RLK_KERNEL(rlk::kAttentionThreads)
rlk_attention_sinks(rlk::AttentionBackwardParams p, std::int64_t first_block, std::int64_t rows) {
  rlk::attention_sink_gradient<rlk::hip::AttentionGpu>(p, static_cast<const float*>(p.workspace), rows,
                                                       first_block + rlk::hip::block_id_x(),
                                                       reinterpret_cast<float*>(rlk::hip::lds()));
}

RLK_ATTENTION_TYPE(bf16, Bf16)
RLK_ATTENTION_TYPE(f16, Fp16)
RLK_ATTENTION_TYPE(f32, Fp32)
