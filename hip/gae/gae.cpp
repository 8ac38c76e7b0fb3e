// The host side of gae on HIP checks memory safety and launches the kernels.
#include "rlk/ops/gae.h"

#include "hip/common/launch.h"
#include "kernels/advantages/gae_check.h"
#include "kernels/tokens/slots.h"
#include "launches.h"
#include "rlk/backends.h"

namespace rlk::hip {

void gae(const GaeParams& p, int device, Stream stream) {
  check_gae(p);
  if (p.sequences.num_slots() == 0) return;
  const char* name = p.kind == GaeKind::kGae                 ? "rlk_gae_scan"
                     : p.kind == GaeKind::kDiscountedReturns ? "rlk_gae_discounted_returns"
                                                             : "rlk_gae_vtrace";
  launch_blocks(device, stream, {kGaeThreads, kGaeLdsBytes}, name, p.sequences.num_sequences + rest_blocks(p.sequences),
                p);
}

}  // namespace rlk::hip
