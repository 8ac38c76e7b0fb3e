// The kernels of policy_loss by the names that the host looks up. Compiled for gfx90a and gfx942, and for the emulation.
#include "hip/common/token_gpu.h"
#include "rlk/kernels/policy_kernels.h"

#define RLK_POLICY_KERNEL(name, threads) \
  RLK_KERNEL(threads)                    \
  rlk_policy_loss_##name(rlk::PolicyLossParams p, std::int64_t first_block, rlk::PolicyWorkspace w
#define RLK_POLICY_SHARED(type) rlk::hip::TokenGpu::shared<rlk::type>()

RLK_POLICY_KERNEL(statistics, rlk::kTokenThreads), std::int64_t slots, int tile) {
  rlk::policy_statistics<rlk::hip::TokenGpu>(p, w, slots, tile, first_block + rlk::hip::block_id_x(),
                                             RLK_POLICY_SHARED(WaveResults));
}
RLK_POLICY_KERNEL(sequences, rlk::kGatherThreads), int tile, int lanes) {
  rlk::policy_sequences<rlk::hip::TokenGpu>(p, w, tile, lanes, first_block + rlk::hip::block_id_x(),
                                            RLK_POLICY_SHARED(GatheredSums));
}
#define RLK_POLICY_TOKENS(name, form)                                                             \
  RLK_POLICY_KERNEL(tokens_##name, rlk::kTokenThreads), std::int64_t slots, int tile) {           \
    rlk::policy_tokens<rlk::hip::TokenGpu, rlk::PolicyForm::form>(                                \
        p, w, slots, tile, first_block + rlk::hip::block_id_x(), RLK_POLICY_SHARED(WaveResults)); \
  }
RLK_POLICY_TOKENS(clipped, kClipped)
RLK_POLICY_TOKENS(any, kTokens)
RLK_POLICY_TOKENS(sequences, kSequences)
RLK_POLICY_KERNEL(sums, rlk::kGatherThreads), int tile, int lanes, std::int64_t num_blocks) {
  rlk::policy_sums<rlk::hip::TokenGpu>(p, w, tile, lanes, num_blocks, first_block + rlk::hip::block_id_x(),
                                       RLK_POLICY_SHARED(BatchSumsShared<rlk::PolicyBatch>));
}
RLK_POLICY_KERNEL(results, rlk::kGatherThreads), std::int64_t num_blocks) {
  static_cast<void>(first_block);
  rlk::policy_results<rlk::hip::TokenGpu>(p, w, num_blocks, RLK_POLICY_SHARED(BatchResultsShared<rlk::PolicyBatch>));
}
RLK_KERNEL(rlk::kTokenThreads)
rlk_policy_loss_scale(rlk::ScaleGradientsParams p, std::int64_t first_block, std::int64_t blocks) {
  rlk::scale_values<rlk::hip::TokenGpu>(p, first_block + rlk::hip::block_id_x(), blocks);
}
