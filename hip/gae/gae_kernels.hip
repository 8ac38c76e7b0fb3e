// The kernels of gae under the names that the host looks up. The kernels are compiled for gfx90a and gfx942, and for
// the emulation.
#include "hip/gae/scan.h"

#define RLK_GAE_KERNEL(name, kind)                                                     \
  RLK_KERNEL(rlk::hip::kGaeThreads) name(rlk::GaeParams p, std::int64_t first_block) { \
    rlk::hip::gae_kernel<rlk::GaeKind::kind>(p, first_block);                          \
  }

RLK_GAE_KERNEL(rlk_gae_scan, kGae)
RLK_GAE_KERNEL(rlk_gae_discounted_returns, kDiscountedReturns)
RLK_GAE_KERNEL(rlk_gae_vtrace, kVtrace)
