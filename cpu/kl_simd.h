// The inner loops of kl, one copy per instruction set (kl_simd.cpp). The arrays may have any alignment.
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
