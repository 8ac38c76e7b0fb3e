// CPU backend of the operator `policy_loss`.
#include "rlk/ops/policy_loss.h"

#include "kernels/losses/policy_batch.h"
#include "kernels/losses/policy_check.h"
#include "note_isa.h"
#include "policy_loss_simd.h"
#include "rlk/backends.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const PolicyLossLanes& lanes() { return RLK_CPU_LANES_IN_USE(policy_loss_simd); }

}  // namespace

void policy_loss_alone(const PolicyLossParams& p) {
  check_policy_loss(p);
  note_isa();
  const auto statistics = [&](const TokenTile& tile, void* partial) { lanes().statistics(p, tile, partial); };
  const auto terms = [&](const PolicyFactors& factors, const TokenTile& tile, TilePartial<8>* const* partials) {
    lanes().terms(p, factors, tile, partials[0]);
  };
  run_token_passes<PolicyBatch, PolicyLossTerms>(p, statistics, terms);
}

void scale_gradients(const ScaleGradientsParams& p) {
  check_scale_gradients(p);
  if (p.count == 0 || *p.factor == 1.0f) return;
  parallel_for(p.count, 16384, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (float* values : {p.first, p.second}) {
      if (values != nullptr) lanes().scale(values + begin, end - begin, *p.factor);
    }
  });
}

}  // namespace rlk::cpu
