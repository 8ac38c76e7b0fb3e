// The kernels of masked_whiten under the names that the host looks up. The kernels are compiled for gfx90a and gfx942,
// and for the emulation.
#include "hip/masked_whiten/passes.h"

#define RLK_WHITEN_KERNEL(name, kernel) \
  RLK_KERNEL(rlk::hip::kWhitenThreads)  \
  rlk_masked_whiten_##name(rlk::MaskedWhitenParams p, std::int64_t first_block) { kernel(p, first_block); }

RLK_WHITEN_KERNEL(sums, rlk::hip::whiten_sums_kernel<false>)
RLK_WHITEN_KERNEL(mean, rlk::hip::whiten_batch_kernel<false>)
RLK_WHITEN_KERNEL(squares, rlk::hip::whiten_sums_kernel<true>)
RLK_WHITEN_KERNEL(variance, rlk::hip::whiten_batch_kernel<true>)
RLK_WHITEN_KERNEL(tokens, rlk::hip::whiten_tokens_kernel)
