// The inner loop of the operator `preference_loss`. CMake compiles preference_loss_simd.cpp once per instruction set.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/preference_loss.h"

namespace rlk::cpu {

struct PreferenceLossLanes {
  // Computes items [begin, end). An item is a pair, a loss of sorted pairs, or an answer under kKto.
  void (*items)(const PreferenceLossParams& p, std::int64_t begin, std::int64_t end);
};

RLK_CPU_LANES(PreferenceLossLanes, preference_loss_simd)

}  // namespace rlk::cpu
