// The kernels of rope under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and for
// the emulation.
#include "hip/rope/rotate.h"

#define RLK_ROPE_KERNEL(name, kernel) \
  RLK_KERNEL(rlk::hip::kRopeThreads)  \
  rlk_rope_##name(rlk::RopeParams p, rlk::RopeGrid g, std::int64_t first_block) { kernel(p, g, first_block); }
#define RLK_ROPE_TYPE(type, T)                                                         \
  RLK_ROPE_KERNEL(halves_##type, (rlk::hip::rope_vec8s_kernel<rlk::hip::T, false>))    \
  RLK_ROPE_KERNEL(neighbours_##type, (rlk::hip::rope_vec8s_kernel<rlk::hip::T, true>)) \
  RLK_ROPE_KERNEL(elements_##type, (rlk::hip::rope_elements_kernel<rlk::hip::T>))

RLK_ROPE_TYPE(bf16, Bf16)
RLK_ROPE_TYPE(f16, Fp16)
RLK_ROPE_TYPE(f32, Fp32)
