// The tiles for a GPU. The build compiles them to check that the matrix instructions appear; they run only under the
// emulation.
#include "hip_tiles.h"

#define RLK_TILE(name, Operand, size)                                     \
  RLK_KERNEL(rlk::hip::kTileThreads)                                      \
  name(const std::uint16_t* a, const std::uint16_t* b, float* c, int k) { \
    rlk::hip::tile_kernel<rlk::hip::Operand, size>(a, b, c, k);           \
  }

RLK_TILE(tile_bf16_32, Bf16x4, 32)
RLK_TILE(tile_bf16_16, Bf16x4, 16)
RLK_TILE(tile_f16_32, Fp16x4, 32)
RLK_TILE(tile_f16_16, Fp16x4, 16)
