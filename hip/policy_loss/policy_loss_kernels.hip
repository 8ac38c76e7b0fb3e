// The kernels of policy_loss under the names that the host looks up. The kernels are compiled for gfx90a and gfx942,
// and for the emulation.
#include "hip/tokens/kernels.h"
#include "kernels/losses/policy_kernels.h"

RLK_TOKEN_STATISTICS(policy_loss, rlk::PolicyBatch)
RLK_TOKEN_TERMS(policy_loss, tokens_clipped, rlk::PolicyBatch, rlk::PolicyTokenTerms<rlk::PolicyForm::kClipped>)
RLK_TOKEN_TERMS(policy_loss, tokens_any, rlk::PolicyBatch, rlk::PolicyTokenTerms<rlk::PolicyForm::kTokens>)
RLK_TOKEN_TERMS(policy_loss, tokens_sequences, rlk::PolicyBatch, rlk::PolicyTokenTerms<rlk::PolicyForm::kSequences>)
RLK_TOKEN_SUMS(policy_loss, rlk::PolicyBatch)
RLK_KERNEL(rlk::kTokenThreads)
rlk_policy_loss_scale(rlk::ScaleGradientsParams p, std::int64_t first_block, std::int64_t blocks) {
  rlk::scale_values<rlk::hip::TokenGpu>(p, first_block + rlk::hip::block_id_x(), blocks);
}
