// The kernels of importance_weights under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation.
#include "hip/tokens/kernels.h"
#include "kernels/losses/importance_kernels.h"

RLK_TOKEN_STATISTICS(importance_weights, rlk::ImportanceBatch)
RLK_TOKEN_TERMS(importance_weights, tokens, rlk::ImportanceBatch,
                rlk::ImportanceTokenTerms<rlk::ImportanceForm::kAlone>)
RLK_TOKEN_TERMS(importance_weights, tokens_normalized, rlk::ImportanceBatch,
                rlk::ImportanceTokenTerms<rlk::ImportanceForm::kNormalized>)
RLK_TOKEN_TERMS(importance_weights, tokens_measured, rlk::ImportanceBatch,
                rlk::ImportanceTokenTerms<rlk::ImportanceForm::kMeasured>)
RLK_TOKEN_SUMS(importance_weights, rlk::ImportanceBatch)
RLK_TOKEN_TERMS(importance_weights_moments, tokens, rlk::ImportanceMomentsBatch,
                rlk::CentralTerms<rlk::ImportanceMoments>)
RLK_TOKEN_SUMS(importance_weights_moments, rlk::ImportanceMomentsBatch)
RLK_TOKEN_KERNEL(importance_weights, divide, rlk::ImportanceBatch, rlk::kTokenThreads), std::int64_t count,
    std::int64_t blocks) {
  rlk::importance_divide<rlk::hip::TokenGpu>(p, w, count, first_block + rlk::hip::block_id_x(), blocks);
}
