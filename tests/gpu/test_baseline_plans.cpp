// optimal_token_baseline has the CPU's bits, as built for sm_90 and as PTX for sm_80: random batches, padded and
// packed, with guard bands around the outputs.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/advantages/optimal_baseline_scan.h"
#include "rlk/backends.h"
#include "rlk/ops/optimal_token_baseline.h"
#include "tests/cpp/baseline_cases.h"
#include "tests/gpu/token_plans.h"

namespace rlk::cuda {
namespace {

void run(baseline_test::Batch* b, PlanCheck* check_of) {
  std::vector<float> advantages = guarded(b->sequences.num_slots()), returns = advantages;
  OptimalTokenBaselineParams p = b->params;
  p.advantages = advantages.data();
  p.returns = returns.data();
  cpu::optimal_token_baseline(p);
  DeviceArrays arrays;
  arrays.put(b->arrays[0], &p.logprob.data);
  arrays.put(b->arrays[2], &p.rewards.data);
  arrays.put(b->arrays[5], &p.sum_p_sq.data);
  arrays.put(b->arrays[3], &p.importance.data);
  arrays.put(*b, &p.sequences, &p.mask);
  if (p.group_offsets != nullptr) {
    const bool wide = p.group_dtype == DType::kInt64;
    p.group_offsets = wide ? arrays.put(b->groups.data(), b->groups.size() * sizeof(b->groups[0]))
                           : arrays.put(b->groups32.data(), b->groups32.size() * sizeof(b->groups32[0]));
  }
  const BaselineWorkspace size(p.sequences, nullptr);
  const std::vector<float> nan(static_cast<std::size_t>(size.bytes / 4 + 4), canonical_nan());
  for (const int arch : {90, 80}) {
    DeviceArrays memory;
    p.advantages = memory.put_guarded(advantages.size());
    p.returns = memory.put_guarded(returns.size());
    p.workspace = memory.put(nan.data(), nan.size() * sizeof(float));
    arch == 90 ? sm90::optimal_token_baseline(p, nullptr) : sm80::optimal_token_baseline(p, nullptr);
    check(cudaDeviceSynchronize(), "optimal_token_baseline");
    check_of->compare("advantages, " + b->text, 0, arch, 0, p.advantages, advantages);
    check_of->compare("returns, " + b->text, 0, arch, 1, p.returns, returns);
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
      baseline_test::Batch b(2 * seed + packed, sequences, longest, packed);
      cuda::run(&b, &check);
    }
  });
  return check.finish();
}
