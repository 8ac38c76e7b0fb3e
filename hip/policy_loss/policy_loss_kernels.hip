// The kernels of policy_loss by the names that the host looks up. Compiled for gfx90a and gfx942, and for the emulation.
#include "hip/common/policy_kernels.h"

RLK_LOSS_KERNELS(policy_loss, rlk::PolicyLossParams, rlk::PolicyStatisticsTerms)
RLK_LOSS_TOKENS(policy_loss, tokens_clipped, rlk::PolicyTokenTerms<rlk::PolicyForm::kClipped>)
RLK_LOSS_TOKENS(policy_loss, tokens_any, rlk::PolicyTokenTerms<rlk::PolicyForm::kTokens>)
RLK_LOSS_TOKENS(policy_loss, tokens_sequences, rlk::PolicyTokenTerms<rlk::PolicyForm::kSequences>)
RLK_KERNEL(rlk::kTokenThreads)
rlk_policy_loss_scale(rlk::ScaleGradientsParams p, std::int64_t first_block, std::int64_t blocks) {
  rlk::scale_values<rlk::hip::TokenGpu>(p, first_block + rlk::hip::block_id_x(), blocks);
}
