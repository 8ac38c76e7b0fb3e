// The kernels of sample under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and for
// the emulation.
#include "hip/sample/kernels.h"

#define RLK_SAMPLE_PASS_OF(Params, name, call)                            \
  RLK_KERNEL(rlk::hip::kSampleThreads)                                    \
  name(rlk::Params p, std::int64_t first_block, rlk::SampleChunk chunk) { \
    call(p, chunk, first_block + rlk::hip::block_id_x());                 \
  }
#define RLK_SAMPLE_PASS(name, call) RLK_SAMPLE_PASS_OF(SampleParams, name, call)
#define RLK_SHARD_PASS(name, call) RLK_SAMPLE_PASS_OF(SamplePartialParams, name, call)
#define RLK_SAMPLE_ROWS(type, T)                                                                                      \
  RLK_KERNEL(rlk::hip::kSampleThreads)                                                                                \
  rlk_sample_process_##type(rlk::ProcessLogitsParams p, std::int64_t first_block) {                                   \
    rlk::hip::process_logits<rlk::hip::T>(p, first_block + rlk::hip::block_id_x());                                   \
  }                                                                                                                   \
  RLK_SAMPLE_PASS(rlk_sample_first_##type, (rlk::hip::sample_select<rlk::hip::T, false>))                             \
  RLK_SAMPLE_PASS(rlk_sample_truncate_##type, (rlk::hip::sample_select<rlk::hip::T, true>))                           \
  RLK_SAMPLE_PASS(rlk_sample_tree_##type, (rlk::hip::sample_tree<rlk::hip::T, rlk::hip::TreePass::kTree>))            \
  RLK_SAMPLE_PASS(rlk_sample_draw_##type, (rlk::hip::sample_tree<rlk::hip::T, rlk::hip::TreePass::kDraw>))            \
  RLK_SAMPLE_PASS(rlk_sample_raw_##type, (rlk::hip::sample_tree<rlk::hip::T, rlk::hip::TreePass::kRaw>))              \
  RLK_SAMPLE_PASS(rlk_sample_top_##type, (rlk::hip::sample_top<rlk::hip::T, false>))                                  \
  RLK_SAMPLE_PASS(rlk_sample_raw_top_##type, (rlk::hip::sample_top<rlk::hip::T, true>))                               \
  RLK_SHARD_PASS(rlk_sample_shard_##type, (rlk::hip::sample_shard<rlk::hip::T>))                                      \
  RLK_SHARD_PASS(rlk_sample_round_##type, (rlk::hip::sample_round<rlk::hip::T>))                                      \
  RLK_SHARD_PASS(rlk_sample_shard_tree_##type, (rlk::hip::sample_shard_tree<rlk::hip::T, rlk::hip::TreePass::kTree>)) \
  RLK_SHARD_PASS(rlk_sample_shard_draw_##type, (rlk::hip::sample_shard_tree<rlk::hip::T, rlk::hip::TreePass::kDraw>)) \
  RLK_SHARD_PASS(rlk_sample_shard_raw_##type, (rlk::hip::sample_shard_tree<rlk::hip::T, rlk::hip::TreePass::kRaw>))

RLK_SAMPLE_ROWS(bf16, Bf16)
RLK_SAMPLE_ROWS(f16, Fp16)
RLK_SAMPLE_ROWS(f32, Fp32)

RLK_SHARD_PASS(rlk_sample_cut, rlk::hip::sample_cut)
RLK_SAMPLE_PASS_OF(SampleMergeParams, rlk_sample_merge, rlk::hip::sample_merge_row)
RLK_SAMPLE_PASS_OF(SampleMergeParams, rlk_sample_merge_tree, rlk::hip::sample_merge_tree)

RLK_KERNEL(rlk::hip::kSampleThreads)
rlk_sample_offsets(rlk::SampleParams p, std::int64_t, rlk::SampleChunk chunk) { rlk::hip::sample_offsets(p, chunk); }
RLK_KERNEL(rlk::hip::kSampleThreads)
rlk_sample_kept(rlk::SampleParams p, std::int64_t first_block, rlk::SampleChunk chunk) {
  rlk::hip::sample_kept(p, chunk, first_block + rlk::hip::block_id_x());
}
