// Every plan of policy_loss has the CPU's bits, as built for sm_90 and for sm_80, whose PTX runs here: random specs,
// padded and packed, with guard bands around every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cpp/cpu/policy_loss.h"
#include "cuda/policy_loss/kernels.h"
#include "tests/gpu/token_plans.h"
#include "tests/policy_loss_cases.h"

namespace rlk::cuda {
namespace {

void run_case(policy_test::Case& c, PlanCheck* check_of) {
  const std::int64_t slots = c.p.sequences.num_slots();
  PolicyLossParams p = c.p;
  std::vector<float> want[] = {guarded(1), guarded(kPolicyMetrics), guarded(slots), guarded(slots)};
  float** const to[] = {&p.loss, &p.metrics, &p.d_logprob, &p.d_entropy};
  const int outputs = p.entropy.data == nullptr ? 3 : 4;
  for (int i = 0; i < outputs; ++i) *to[i] = want[i].data();
  cpu::policy_loss(p);

  DeviceArrays device;
  PolicyTokens* const arrays[] = {&p.logprob,    &p.old_logprob, &p.advantage, &p.ref_logprob,
                                  &p.importance, &p.entropy,     &p.selected};
  for (int k = 0; k < 7; ++k) device.put(c.arrays[k], &arrays[k]->data);
  device.put(c, &p.sequences, &p.mask);
  for (const TokenPlan& plan : kTokenPlans) {
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      p.workspace = memory.workspace<PolicyBatch>(p.sequences, plan);
      for (int i = 0; i < outputs; ++i) *to[i] = memory.put_guarded(want[i].size());
      arch == 90 ? policy_loss_sm90(p, plan, nullptr) : policy_loss_sm80(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "policy_loss");
      for (int i = 0; i < outputs; ++i) check_of->compare(c.text, plan.tile, arch, i, *to[i], want[i]);
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
      policy_test::Case c;
      policy_test::make_case(2 * seed + packed, sequences, longest, packed, &c);
      cuda::run_case(c, &check);
    }
  });
  return check.finish();
}
