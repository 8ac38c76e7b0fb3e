// The inner loops of the operator `policy_loss`. CMake compiles policy_loss_simd.cpp once per instruction set. The
// arrays may have any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/policy_loss.h"
#include "tokens/tile.h"

namespace rlk {
struct PolicyFactors;
}

namespace rlk::cpu {

struct PolicyLossLanes {
  void (*statistics)(const PolicyLossParams& p, const TokenTile& tile, void* partial);
  void (*terms)(const PolicyLossParams& p, const PolicyFactors& factors, const TokenTile& tile, void* partial);
  void (*scale)(float* values, std::int64_t count, float factor);
};

RLK_CPU_LANES(PolicyLossLanes, policy_loss_simd)

}  // namespace rlk::cpu
