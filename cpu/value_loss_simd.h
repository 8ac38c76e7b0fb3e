// The inner loops of the operator `value_loss`. CMake compiles value_loss_simd.cpp once per instruction set. The arrays
// may have any alignment.
#pragma once

#include "lanes.h"
#include "rlk/ops/value_loss.h"
#include "tokens/tile.h"

namespace rlk {
struct CentralPair;
struct ValueFactors;
}  // namespace rlk

namespace rlk::cpu {

struct ValueLossLanes {
  void (*statistics)(const ValueLossParams& p, const TokenTile& tile, void* partial);
  void (*terms)(const ValueLossParams& p, const ValueFactors& factors, const TokenTile& tile, void* partial);
  void (*moments)(const ValueLossParams& p, const CentralPair& pair, const TokenTile& tile, void* partial);
};

RLK_CPU_LANES(ValueLossLanes, value_loss_simd)

}  // namespace rlk::cpu
