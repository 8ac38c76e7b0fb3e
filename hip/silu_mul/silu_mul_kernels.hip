// The kernels of silu_mul by the names that the host looks up. Compiled for gfx90a and gfx942, and for the emulation.
#include "hip/silu_mul/kernels.h"

#define RLK_SILU_MUL_KERNELS(type, T, name, activation, shape, vector)                                            \
  RLK_KERNEL(rlk::hip::kGatedThreads)                                                                             \
  rlk_silu_mul_forward_##name##_##shape##_##type(rlk::GatedMulParams p, std::int64_t first_block,                 \
                                                 rlk::RowSplit split) {                                           \
    rlk::hip::gated_mul_kernel<rlk::hip::T, rlk::Activation::activation, vector>(p, first_block, split);          \
  }                                                                                                               \
  RLK_KERNEL(rlk::hip::kGatedThreads)                                                                             \
  rlk_silu_mul_backward_##name##_##shape##_##type(rlk::GatedMulBackwardParams p, std::int64_t first_block,        \
                                                  rlk::RowSplit split) {                                          \
    rlk::hip::gated_mul_backward_kernel<rlk::hip::T, rlk::Activation::activation, vector>(p, first_block, split); \
  }
#define RLK_SILU_MUL_ACTIVATIONS(type, T, shape, vector)    \
  RLK_SILU_MUL_KERNELS(type, T, silu, kSilu, shape, vector) \
  RLK_SILU_MUL_KERNELS(type, T, gelu, kGelu, shape, vector) \
  RLK_SILU_MUL_KERNELS(type, T, gelu_tanh, kGeluTanh, shape, vector)
#define RLK_SILU_MUL_TYPE(type, T)                 \
  RLK_SILU_MUL_ACTIVATIONS(type, T, vectors, true) \
  RLK_SILU_MUL_ACTIVATIONS(type, T, elements, false)

RLK_SILU_MUL_TYPE(bf16, Bf16)
RLK_SILU_MUL_TYPE(f16, Fp16)
RLK_SILU_MUL_TYPE(f32, Fp32)
