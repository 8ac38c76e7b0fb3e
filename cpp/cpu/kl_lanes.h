// The inner loops of kl, one copy per instruction set (kl_lanes.cpp). Memory has any alignment.
#pragma once

#include "rlk/ops/kl.h"
#include "token_tile.h"

namespace rlk::cpu {

struct KlLanes {
  void (*terms)(const KlParams& p, const TokenTile& tile);
};

namespace baseline {
extern const KlLanes kl_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KlLanes kl_lanes;
}
namespace avx512 {
extern const KlLanes kl_lanes;
}
#endif

}  // namespace rlk::cpu
