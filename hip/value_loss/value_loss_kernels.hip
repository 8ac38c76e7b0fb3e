// The kernels of value_loss under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and
// for the emulation.
#include "hip/tokens/kernels.h"
#include "kernels/losses/value_terms.h"

RLK_TOKEN_STATISTICS(value_loss, rlk::ValueBatch)
RLK_TOKEN_TERMS(value_loss, tokens, rlk::ValueBatch, rlk::ValueTokenTerms)
RLK_TOKEN_SUMS(value_loss, rlk::ValueBatch)
RLK_TOKEN_TERMS(value_loss_moments, tokens, rlk::ValueMomentsBatch, rlk::CentralTerms<rlk::ValueMoments>)
RLK_TOKEN_SUMS(value_loss_moments, rlk::ValueMomentsBatch)
