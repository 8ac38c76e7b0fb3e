// CPU backend of policy_loss.
#include "policy_loss.h"

#include "isa.h"
#include "policy_loss_lanes.h"
#include "policy_passes.h"
#include "rlk/kernels/policy_check.h"

namespace rlk::cpu {
namespace {

const PolicyLossLanes& lanes() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::policy_loss_lanes;
    case Isa::kAvx2:
      return avx2::policy_loss_lanes;
    case Isa::kBaseline:
      break;
  }
#endif
  return baseline::policy_loss_lanes;
}

}  // namespace

void policy_loss(const PolicyLossParams& p) {
  check_policy_loss(p);
  run_policy_passes(p, lanes().statistics, lanes().terms);
}

void scale_gradients(const ScaleGradientsParams& p) {
  if (*p.factor == 1.0f) return;
  parallel_for(p.count, 16384, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (float* values : {p.first, p.second}) {
      if (values != nullptr) lanes().scale(values + begin, end - begin, *p.factor);
    }
  });
}

}  // namespace rlk::cpu
