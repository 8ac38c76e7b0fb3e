// The kernels of mismatch_metrics under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation.
#include "hip/tokens/kernels.h"
#include "kernels/losses/mismatch_terms.h"

RLK_TOKEN_TERMS(mismatch_metrics, tokens, rlk::MismatchBatch, rlk::MismatchTerms<rlk::kMismatchDifferences>,
                rlk::MismatchTerms<rlk::kMismatchProbabilities>)
RLK_TOKEN_SUMS(mismatch_metrics, rlk::MismatchBatch)
RLK_TOKEN_TERMS(mismatch_metrics_moments, tokens, rlk::MismatchMomentsBatch, rlk::CentralTerms<rlk::MismatchMoments>)
RLK_TOKEN_SUMS(mismatch_metrics_moments, rlk::MismatchMomentsBatch)
