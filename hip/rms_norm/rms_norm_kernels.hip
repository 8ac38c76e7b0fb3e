// The kernels of rms_norm under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and
// for the emulation.
#include "hip/rms_norm/backward.h"
#include "hip/rms_norm/forward.h"

#define RLK_RMS_NORM_KERNELS(type, T, shape, threads, vector)                                \
  RLK_KERNEL(rlk::hip::kNormThreads)                                                         \
  rlk_rms_norm_forward_##shape##_##type(rlk::RmsNormParams p, std::int64_t first_block) {    \
    rlk::hip::rms_norm_kernel<rlk::hip::T, threads, vector>(p, first_block);                 \
  }                                                                                          \
  RLK_KERNEL(rlk::hip::kNormThreads)                                                         \
  rlk_rms_norm_dx_##shape##_##type(rlk::RmsNormBackwardParams p, std::int64_t first_block) { \
    rlk::hip::rms_norm_dx_kernel<rlk::hip::T, threads, vector>(p, first_block);              \
  }
#define RLK_RMS_NORM_CHAINS(type, T, shape, vector)                                            \
  RLK_KERNEL(rlk::hip::kNormThreads)                                                           \
  rlk_rms_norm_chains_##shape##_##type(rlk::RmsNormBackwardParams p, std::int64_t first_block, \
                                       std::int64_t column_blocks) {                           \
    rlk::hip::rms_norm_chains_kernel<rlk::hip::T, vector>(p, first_block, column_blocks);      \
  }
#define RLK_RMS_NORM_TYPE(type, T)                                                   \
  RLK_RMS_NORM_KERNELS(type, T, wave, rlk::hip::kWave, true)                         \
  RLK_RMS_NORM_KERNELS(type, T, block, rlk::hip::kNormThreads, true)                 \
  RLK_RMS_NORM_KERNELS(type, T, wave_elements, rlk::hip::kWave, false)               \
  RLK_RMS_NORM_KERNELS(type, T, block_elements, rlk::hip::kNormThreads, false)       \
  RLK_RMS_NORM_CHAINS(type, T, vectors, true)                                        \
  RLK_RMS_NORM_CHAINS(type, T, elements, false)                                      \
  RLK_KERNEL(rlk::hip::kNormThreads)                                                 \
  rlk_rms_norm_fold_##type(rlk::RmsNormBackwardParams p, std::int64_t first_block) { \
    rlk::hip::rms_norm_fold_kernel<rlk::hip::T>(p, first_block);                     \
  }

RLK_RMS_NORM_TYPE(bf16, Bf16)
RLK_RMS_NORM_TYPE(f16, Fp16)
RLK_RMS_NORM_TYPE(f32, Fp32)
