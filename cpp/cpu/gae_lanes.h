// The inner loops of gae, one copy per instruction set (gae_lanes.cpp).
#pragma once

#include "rlk/ops/gae.h"

namespace rlk::cpu {

struct GaeLanes {
  void (*scan_sequence)(const GaeParams& p, std::int64_t sequence);
};

namespace baseline {
extern const GaeLanes gae_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const GaeLanes gae_lanes;
}
namespace avx512 {
extern const GaeLanes gae_lanes;
}
#endif

}  // namespace rlk::cpu
