// The inner loops of gae, one copy per instruction set (gae_simd.cpp).
#pragma once

#include "lanes.h"
#include "rlk/ops/gae.h"

namespace rlk::cpu {

struct GaeLanes {
  void (*scan_sequence)(const GaeParams& p, std::int64_t sequence);
};

RLK_CPU_LANES(GaeLanes, gae_simd)

}  // namespace rlk::cpu
