// The inner loops of policy_loss, one copy per instruction set (policy_loss_lanes.cpp). Memory has any alignment.
#pragma once

#include <cstdint>

#include "rlk/ops/policy_loss.h"
#include "token_tile.h"

namespace rlk {
struct PolicyFactors;
}

namespace rlk::cpu {

struct PolicyLossLanes {
  void (*statistics)(const PolicyLossParams& p, const TokenTile& tile, void* partial);
  void (*terms)(const PolicyLossParams& p, const PolicyFactors& factors, const TokenTile& tile, void* partial);
  void (*scale)(float* values, std::int64_t count, float factor);
};

namespace baseline {
extern const PolicyLossLanes policy_loss_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const PolicyLossLanes policy_loss_lanes;
}
namespace avx512 {
extern const PolicyLossLanes policy_loss_lanes;
}
#endif

}  // namespace rlk::cpu
