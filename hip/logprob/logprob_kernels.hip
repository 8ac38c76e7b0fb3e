// The kernels of logprob under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and
// for the emulation.
#include "hip/logprob/kernels.h"

#define RLK_LOGPROB_KERNELS(type, T)                                                                                   \
  RLK_KERNEL(rlk::hip::kGroupThreads)                                                                                  \
  rlk_logprob_groups_##type(rlk::LogprobParams p, rlk::GroupGrid grid, std::int64_t first_row, float* nodes) {         \
    rlk::hip::groups_kernel<rlk::hip::T, false>(p, grid, first_row, nodes);                                            \
  }                                                                                                                    \
  RLK_KERNEL(rlk::hip::kGroupThreads)                                                                                  \
  rlk_logprob_groups_moments_##type(rlk::LogprobParams p, rlk::GroupGrid grid, std::int64_t first_row, float* nodes) { \
    rlk::hip::groups_kernel<rlk::hip::T, true>(p, grid, first_row, nodes);                                             \
  }                                                                                                                    \
  RLK_KERNEL(rlk::hip::kGroupThreads)                                                                                  \
  rlk_logprob_roots_##type(rlk::LogprobParams p, rlk::GroupGrid grid, std::int64_t first_row, float* nodes) {          \
    rlk::hip::roots_kernel<rlk::hip::T>(p, grid, first_row, nodes);                                                    \
  }                                                                                                                    \
  RLK_KERNEL(rlk::kSmoothingThreads)                                                                                   \
  rlk_logprob_smoothing_##type(rlk::LogprobParams p, rlk::GroupGrid grid, std::int64_t first_row) {                    \
    rlk::hip::smoothing_kernel<rlk::hip::T>(p, grid, first_row);                                                       \
  }                                                                                                                    \
  RLK_KERNEL(rlk::hip::kBackwardThreads)                                                                               \
  rlk_logprob_backward_##type(rlk::LogprobBackwardParams p, std::int64_t first_row) {                                  \
    rlk::hip::backward_kernel<rlk::hip::T>(p, first_row);                                                              \
  }

RLK_LOGPROB_KERNELS(bf16, Bf16)
RLK_LOGPROB_KERNELS(f16, Fp16)
RLK_LOGPROB_KERNELS(f32, Fp32)

RLK_KERNEL(rlk::hip::kMergeThreads) rlk_logprob_merge(rlk::LogprobMergeParams p) { rlk::hip::merge_kernel(p); }
