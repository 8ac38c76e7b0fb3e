// The inner loops of the operator `covariance_mask`. CMake compiles covariance_mask_simd.cpp once per instruction set.
// The arrays may have any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/covariance_mask.h"
#include "tokens/tile.h"

namespace rlk::cpu {

struct CovarianceMaskLanes {
  void (*sums)(const CovarianceMaskParams& p, const TokenTile& tile, void* partial);
  void (*covariances)(const CovarianceMaskParams& p, float mean_advantage, float mean_logprob, const TokenTile& tile);
};

RLK_CPU_LANES(CovarianceMaskLanes, covariance_mask_simd)

}  // namespace rlk::cpu
