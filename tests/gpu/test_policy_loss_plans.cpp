// Every plan of policy_loss has the CPU's bits, as built for sm_90 and as PTX for sm_80. Specs are random; batches are
// padded, packed or plain; guard bands surround every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/policy_loss/kernels.h"
#include "kernels/losses/policy_plain.h"
#include "rlk/backends.h"
#include "rlk/ops/policy_loss.h"
#include "tests/cpp/policy_loss_cases.h"
#include "tests/gpu/token_plans.h"

namespace rlk::cuda {
namespace {

void run_case(policy_test::Case& c, PlanCheck* check_of, bool expects_plain = false) {
  const std::int64_t slots = c.p.sequences.num_slots();
  PolicyLossParams p = c.p;
  std::vector<float> want[] = {guarded(1), guarded(kPolicyMetrics), guarded(slots), guarded(slots)};
  float** const to[] = {&p.loss, &p.metrics, &p.d_logprob, &p.d_entropy};
  const int outputs = p.entropy.data == nullptr ? 3 : 4;
  for (int i = 0; i < outputs; ++i) *to[i] = want[i].data();
  cpu::policy_loss_alone(p);

  DeviceArrays device;
  PolicyTokens* const arrays[] = {&p.logprob,    &p.old_logprob, &p.advantage, &p.ref_logprob,
                                  &p.importance, &p.entropy,     &p.selected,  &p.token_weight};
  for (int k = 0; k < 8; ++k) device.put(c.arrays[k], &arrays[k]->data);
  device.put(c, &p.sequences, &p.mask);
  for (const TokenPlan& plan : kTokenPlans) {
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      p.workspace = memory.workspace<PolicyBatch>(p.sequences, plan);
      for (int i = 0; i < outputs; ++i) *to[i] = memory.put_guarded(want[i].size());
      arch == 90 ? sm90::policy_loss_alone(p, plan, nullptr) : sm80::policy_loss_alone(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "policy_loss");
      if (expects_plain && !is_plain(p)) check_of->fail(c.text + " is not plain");
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
  // Some shapes end within a step of vec4s or within a tile. Sequences take one block, a cluster's blocks, or more.
  constexpr std::int64_t kPlainShapes[][2] = {{1, 4},    {5, 12},    {300, 128},  {700, 8},  {1030, 4},  {2048, 4},
                                              {2050, 4}, {9, 256},   {520, 260},  {2, 1028}, {33, 2048}, {1, 9000},
                                              {4, 8196}, {2, 20000}, {600, 4100}, {1, 70000}};
  unsigned seed = 1000000;
  for (const auto& [sequences, tokens] : kPlainShapes) {
    for (int i = 0; i < (sequences * tokens > 30000 ? 6 : 25); ++i) {
      policy_test::Case c;
      policy_test::make_case(seed++, sequences, tokens, false, &c, true);
      cuda::run_case(c, &check, true);
    }
  }
  return check.finish();
}
