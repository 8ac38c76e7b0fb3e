// The inner loops of the operator `importance_weights`. CMake compiles importance_weights_simd.cpp once per instruction
// set. The arrays may have any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/importance_weights.h"
#include "tokens/tile.h"

namespace rlk {
struct CentralPair;
struct ImportanceFactors;
}  // namespace rlk

namespace rlk::cpu {

struct ImportanceWeightsLanes {
  void (*statistics)(const ImportanceWeightsParams& p, const TokenTile& tile, void* partial);
  void (*terms)(const ImportanceWeightsParams& p, const ImportanceFactors& factors, const TokenTile& tile,
                void* partial);
  void (*moments)(const ImportanceWeightsParams& p, const CentralPair& pair, const TokenTile& tile, void* partial);
  void (*divide)(float* values, std::int64_t count, float divisor);
};

RLK_CPU_LANES(ImportanceWeightsLanes, importance_weights_simd)

}  // namespace rlk::cpu
