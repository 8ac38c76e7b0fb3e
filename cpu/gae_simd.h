// The inner loops of the operator `gae`. CMake compiles gae_simd.cpp once per instruction set.
#pragma once

#include "lanes.h"
#include "rlk/ops/gae.h"

namespace rlk::cpu {

struct GaeLanes {
  void (*scan_sequence)(const GaeParams& p, std::int64_t sequence);
};

RLK_CPU_LANES(GaeLanes, gae_simd)

}  // namespace rlk::cpu
