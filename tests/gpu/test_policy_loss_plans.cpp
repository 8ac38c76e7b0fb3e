// Every plan of policy_loss has the CPU's bits, as built for sm_90 and for sm_80, whose PTX runs here: random specs,
// padded and packed, with guard bands around every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cpp/cpu/policy_loss.h"
#include "cuda/policy_loss/kernels.h"
#include "cuda/policy_loss/policy_loss.h"
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
  p.mask.data = device.put(c.mask.data(), c.mask.size());
  if (p.sequences.packed()) {
    p.sequences.cu_seqlens = p.sequences.cu_dtype == DType::kInt64 ? device.put(c.cuts64.data(), c.cuts64.size() * 8)
                                                                   : device.put(c.cuts32.data(), c.cuts32.size() * 4);
  }
  const std::vector<unsigned char> garbage(static_cast<std::size_t>(policy_loss_workspace_bytes(p)) + (1 << 20), 0xcd);
  for (const PolicyPlan& plan : kPolicyPlans) {
    if (plan.tile == kWarpTile && slots > 200000) continue;  // more slots than the workspace here
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      p.workspace = memory.put(garbage.data(), garbage.size());
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
  // No sequence; no token; one; short; more sequences than a block sums; one tile and a token; many tiles.
  constexpr std::int64_t kShapes[][2] = {{0, 7},     {3, 0},    {1, 1},     {5, 13},    {70, 3},
                                         {300, 129}, {9, 256},  {2, 1025},  {33, 2048}, {1, 9000},
                                         {130, 40},  {4, 8193}, {2, 20000}, {1, 70000}};
  unsigned seed = 1;
  cuda::PlanCheck check;
  for (const auto& shape : kShapes) {
    for (const bool packed : {false, true}) {
      for (int i = 0; i < (shape[0] * shape[1] > 30000 ? 6 : 25); ++i) {
        policy_test::Case c;
        policy_test::make_case(seed++, shape[0], shape[1], packed, &c);
        cuda::run_case(c, &check);
      }
    }
  }
  return check.finish();
}
