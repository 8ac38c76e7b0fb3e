// The kernels of value_loss by the names that the host looks up. Compiled for gfx90a and gfx942, and for the emulation.
#include "hip/common/policy_kernels.h"
#include "rlk/kernels/value_terms.h"

RLK_LOSS_KERNELS(value_loss, rlk::ValueLossParams, rlk::ValueStatisticsTerms)
RLK_LOSS_TOKENS(value_loss, tokens, rlk::ValueTokenTerms)
