// The inner loops of the operator `kl`. CMake compiles kl_simd.cpp once per instruction set. The arrays may have any
// alignment.
#pragma once

#include "lanes.h"
#include "rlk/ops/kl.h"
#include "tokens/tile.h"

namespace rlk::cpu {

struct KlLanes {
  void (*terms)(const KlParams& p, const TokenTile& tile);
};

RLK_CPU_LANES(KlLanes, kl_simd)

}  // namespace rlk::cpu
