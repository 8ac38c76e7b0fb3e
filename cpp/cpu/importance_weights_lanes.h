// The inner loops of importance_weights, one copy per instruction set (importance_weights_lanes.cpp). Memory has any alignment.
#pragma once

#include <cstdint>

#include "rlk/ops/importance_weights.h"
#include "token_tile.h"

namespace rlk {
struct ImportanceFactors;
}

namespace rlk::cpu {

struct ImportanceWeightsLanes {
  void (*statistics)(const ImportanceWeightsParams& p, const TokenTile& tile, void* partial);
  void (*terms)(const ImportanceWeightsParams& p, const ImportanceFactors& factors, const TokenTile& tile,
                void* partial);
  void (*divide)(float* values, std::int64_t count, float divisor);
};

namespace baseline {
extern const ImportanceWeightsLanes importance_weights_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const ImportanceWeightsLanes importance_weights_lanes;
}
namespace avx512 {
extern const ImportanceWeightsLanes importance_weights_lanes;
}
#endif

}  // namespace rlk::cpu
