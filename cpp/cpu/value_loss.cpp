// CPU backend of value_loss.
#include "value_loss.h"

#include "isa.h"
#include "policy_passes.h"
#include "rlk/kernels/value_check.h"
#include "rlk/kernels/value_terms.h"
#include "value_loss_lanes.h"

namespace rlk::cpu {
namespace {

const ValueLossLanes& lanes() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::value_loss_lanes;
    case Isa::kAvx2:
      return avx2::value_loss_lanes;
    case Isa::kBaseline:
      break;
  }
#endif
  return baseline::value_loss_lanes;
}

}  // namespace

void value_loss(const ValueLossParams& p) {
  check_value_loss(p);
  run_policy_passes(p, lanes().statistics, lanes().terms);
}

}  // namespace rlk::cpu
