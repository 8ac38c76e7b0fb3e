// The kernels of covariance_mask under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation.
#include "hip/tokens/kernels.h"
#include "kernels/losses/covariance_select.h"

RLK_TOKEN_TERMS(covariance_mask, means, rlk::CovarianceBatch, rlk::CovarianceSumTerms)
RLK_TOKEN_SUMS(covariance_mask, rlk::CovarianceBatch)
RLK_TOKEN_TERMS(covariance_mask, tokens, rlk::CovarianceBatch, rlk::CovarianceTerms)
RLK_TOKEN_KERNEL(covariance_mask, clear, rlk::CovarianceBatch, rlk::kSelectThreads)) {
  static_cast<void>(p);
  rlk::covariance_clear<rlk::hip::TokenGpu>(w, first_block + rlk::hip::block_id_x());
}
RLK_TOKEN_KERNEL(covariance_mask, priorities, rlk::CovarianceBatch, rlk::kSelectThreads), std::int64_t count,
    std::int64_t blocks) {
  rlk::covariance_priorities<rlk::hip::TokenGpu>(p, w, count, first_block + rlk::hip::block_id_x(), blocks,
                                                 RLK_TOKEN_SHARED(rlk::SelectShared));
}
RLK_TOKEN_KERNEL(covariance_mask, digits, rlk::CovarianceBatch, rlk::kSelectThreads), std::int64_t count, int previous,
    int pass, std::int64_t blocks) {
  rlk::covariance_digits<rlk::hip::TokenGpu>(p, w, count, previous, pass, first_block + rlk::hip::block_id_x(), blocks,
                                             RLK_TOKEN_SHARED(rlk::SelectShared));
}
RLK_TOKEN_KERNEL(covariance_mask, write, rlk::CovarianceBatch, rlk::kSelectThreads), std::int64_t count,
    std::int64_t blocks) {
  rlk::covariance_write<rlk::hip::TokenGpu>(p, w, count, first_block + rlk::hip::block_id_x(), blocks,
                                            RLK_TOKEN_SHARED(rlk::SelectShared));
}
