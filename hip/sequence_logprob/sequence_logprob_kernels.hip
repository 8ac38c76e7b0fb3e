// The kernels of sequence_logprob under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation.
#include "hip/sequence_logprob/sums.h"

#define RLK_SEQUENCE_LOGPROB_TYPE(type, T)                                                             \
  RLK_KERNEL(rlk::hip::kSumThreads)                                                                    \
  rlk_sequence_logprob_sum_##type(rlk::SequenceLogprobParams p, std::int64_t first_block) {            \
    rlk::hip::sequence_logprob_kernel<rlk::hip::T>(p, first_block);                                    \
  }                                                                                                    \
  RLK_KERNEL(rlk::kGradientThreads)                                                                    \
  rlk_sequence_logprob_backward_##type(rlk::SequenceLogprobBackwardParams p, std::int64_t first_block, \
                                       rlk::GradientGrid g) {                                          \
    rlk::hip::sequence_logprob_backward_kernel<rlk::hip::T>(p, g, first_block);                        \
  }

RLK_SEQUENCE_LOGPROB_TYPE(bf16, Bf16)
RLK_SEQUENCE_LOGPROB_TYPE(f16, Fp16)
RLK_SEQUENCE_LOGPROB_TYPE(f32, Fp32)
