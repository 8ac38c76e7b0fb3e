// The inner loops of covariance_mask, one copy per instruction set (covariance_mask_lanes.cpp). Memory has any alignment.
#pragma once

#include <cstdint>

#include "rlk/ops/covariance_mask.h"
#include "token_tile.h"

namespace rlk::cpu {

struct CovarianceMaskLanes {
  void (*sums)(const CovarianceMaskParams& p, const TokenTile& tile, void* partial);
  void (*covariances)(const CovarianceMaskParams& p, float mean_advantage, float mean_logprob, const TokenTile& tile);
};

namespace baseline {
extern const CovarianceMaskLanes covariance_mask_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const CovarianceMaskLanes covariance_mask_lanes;
}
namespace avx512 {
extern const CovarianceMaskLanes covariance_mask_lanes;
}
#endif

}  // namespace rlk::cpu
