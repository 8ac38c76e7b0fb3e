// Every plan of importance_weights and mismatch_metrics has the CPU's bits, as built for sm_90 and as PTX for sm_80:
// random batches, padded and packed, with guard bands around every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/losses/mismatch_terms.h"
#include "kernels/losses/rejection_terms.h"
#include "rlk/backends.h"
#include "rlk/ops/importance_weights.h"
#include "rlk/ops/mismatch_metrics.h"
#include "tests/cpp/rollout_cases.h"
#include "tests/gpu/token_plans.h"

namespace rlk::cuda {
namespace {

ImportanceSpec spec_of(unsigned seed) {
  constexpr ImportanceLevel kLevels[] = {ImportanceLevel::kToken, ImportanceLevel::kSequence,
                                         ImportanceLevel::kGeometric};
  ImportanceSpec s;
  s.level = kLevels[seed % 3];
  s.zero_outside = seed / 3 % 2;
  s.normalize = seed / 2 % 2;
  s.low = seed % 5 == 0 ? -rollout_test::kInf : 0.8f;
  s.high = 1.3f;
  s.limit = seed % 4 == 0 ? rollout_test::kInf : 20.0f;
  if (seed % 7 == 0) s.token.k1_low = -0.3f;
  if (seed % 7 == 1) s.sum.k3 = 0.4f;
  if (seed % 7 == 2) s.mean.k1_high = 0.05f;
  if (seed % 7 == 3) s.most.k2 = 0.4f;
  if (seed % 7 == 4) s.veto_below = -0.9f;
  return s;
}

// The batch on the device.
struct There {
  Sequences sequences;
  PolicyTokens train, rollout;
  TokenMask mask;
  DeviceArrays arrays;

  explicit There(const rollout_test::Batch& b)
      : sequences(b.sequences), train(b.train), rollout(b.rollout), mask(b.token_mask) {
    arrays.put(b.arrays[0], &train.data);
    arrays.put(b.arrays[4], &rollout.data);
    arrays.put(b, &sequences, &mask);
  }
};

void run_metrics(const rollout_test::Batch& b, const There& there, std::int32_t neutral, PlanCheck* check_of) {
  std::vector<float> want = guarded(kMismatchMetrics);
  cpu::mismatch_metrics({b.sequences, b.train, b.rollout, b.token_mask, 20.0f, neutral, want.data()});
  for (const TokenPlan& plan : kTokenPlans) {
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      MismatchMetricsParams p = {there.sequences, there.train, there.rollout, there.mask, 20.0f, neutral};
      p.metrics = memory.put_guarded(want.size());
      p.workspace = memory.workspace<MismatchBatch>(p.sequences, plan);
      arch == 90 ? sm90::mismatch_metrics(p, plan, nullptr) : sm80::mismatch_metrics(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "mismatch_metrics");
      check_of->compare("metrics, " + b.text, plan.tile, arch, 0, p.metrics, want);
    }
  }
}

void run_weights(const rollout_test::Batch& b, const There& there, const ImportanceSpec& s, PlanCheck* check_of) {
  const std::int64_t slots = b.sequences.num_slots();
  std::vector<float> weights = guarded(slots), kept = guarded(slots), metrics = guarded(kImportanceMetrics);
  cpu::importance_weights(
      {b.sequences, b.train, b.rollout, b.token_mask, s, weights.data(), kept.data(), metrics.data()});
  for (const TokenPlan& plan : kTokenPlans) {
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      ImportanceWeightsParams p = {there.sequences, there.train, there.rollout, there.mask, s};
      p.weights = memory.put_guarded(weights.size());
      p.kept = memory.put_guarded(kept.size());
      p.metrics = memory.put_guarded(metrics.size());
      p.workspace = memory.workspace<ImportanceBatch>(p.sequences, plan);
      arch == 90 ? sm90::importance_weights(p, plan, nullptr) : sm80::importance_weights(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "importance_weights");
      check_of->compare("weights, " + b.text, plan.tile, arch, 0, p.weights, weights);
      check_of->compare("kept, " + b.text, plan.tile, arch, 1, p.kept, kept);
      check_of->compare("metrics of weights, " + b.text, plan.tile, arch, 2, p.metrics, metrics);
    }
  }
}

}  // namespace
}  // namespace rlk::cuda

int main() {
  using namespace rlk;
  if (!cuda::has_device()) return cuda::kSkipped;
  cuda::PlanCheck check;
  cuda::for_each_plan_case([&](unsigned seed, std::int64_t sequences, std::int64_t longest) {
    for (const bool packed : {false, true}) {
      const unsigned of_case = 2 * seed + packed;
      const rollout_test::Batch b(of_case, sequences, longest, packed);
      const cuda::There there(b);
      cuda::run_metrics(b, there, static_cast<std::int32_t>(seed % 2), &check);
      cuda::run_weights(b, there, cuda::spec_of(of_case), &check);
    }
  });
  return check.finish();
}
