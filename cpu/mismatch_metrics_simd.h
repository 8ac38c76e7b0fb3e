// The inner loops of the operator `mismatch_metrics`. CMake compiles mismatch_metrics_simd.cpp once per instruction
// set. The arrays may have any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/mismatch_metrics.h"
#include "tokens/tile.h"

namespace rlk {
struct MismatchPair;
}

namespace rlk::cpu {

struct MismatchMetricsLanes {
  void (*terms)(const MismatchMetricsParams& p, const TokenTile& tile, void* differences, void* probabilities);
  void (*moments)(const MismatchMetricsParams& p, const MismatchPair& pair, const TokenTile& tile, void* partial);
};

RLK_CPU_LANES(MismatchMetricsLanes, mismatch_metrics_simd)

}  // namespace rlk::cpu
