// The inner loop of preference_loss, one copy per instruction set (preference_loss_simd.cpp).
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/preference_loss.h"

namespace rlk::cpu {

struct PreferenceLossLanes {
  // Items [begin, end): pairs, losses of sorted pairs, or elements of kKto.
  void (*items)(const PreferenceLossParams& p, std::int64_t begin, std::int64_t end);
};

RLK_CPU_LANES(PreferenceLossLanes, preference_loss_simd)

}  // namespace rlk::cpu
