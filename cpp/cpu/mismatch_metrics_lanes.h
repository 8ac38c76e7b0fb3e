// The inner loops of mismatch_metrics, one copy per instruction set (mismatch_metrics_lanes.cpp). Memory has any alignment.
#pragma once

#include <cstdint>

#include "rlk/ops/mismatch_metrics.h"
#include "token_tile.h"

namespace rlk::cpu {

struct MismatchMetricsLanes {
  void (*terms)(const MismatchMetricsParams& p, const TokenTile& tile, void* differences, void* probabilities);
};

namespace baseline {
extern const MismatchMetricsLanes mismatch_metrics_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const MismatchMetricsLanes mismatch_metrics_lanes;
}
namespace avx512 {
extern const MismatchMetricsLanes mismatch_metrics_lanes;
}
#endif

}  // namespace rlk::cpu
