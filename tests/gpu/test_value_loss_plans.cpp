// Every plan of value_loss has the CPU's bits, as built for sm_90 and as PTX for sm_80: random calls, padded and
// packed, with guard bands around every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/losses/value_terms.h"
#include "rlk/backends.h"
#include "rlk/ops/value_loss.h"
#include "tests/cpp/value_loss_cases.h"
#include "tests/gpu/token_plans.h"

namespace rlk::cuda {
namespace {

void run_case(value_test::Case& c, PlanCheck* check_of) {
  const std::int64_t slots = c.p.sequences.num_slots();
  ValueLossParams p = c.p;
  std::vector<float> want[] = {guarded(1), guarded(kValueMetrics), guarded(slots)};
  p.loss = want[0].data();
  p.metrics = want[1].data();
  p.d_value = want[2].data();
  cpu::value_loss(p);

  DeviceArrays device;
  PolicyTokens* const arrays[] = {&p.value, &p.old_value, &p.returns, &p.token_weight};
  for (int k = 0; k < value_test::kArrays; ++k) device.put(c.arrays[k], &arrays[k]->data);
  device.put(c, &p.sequences, &p.mask);
  for (const TokenPlan& plan : kTokenPlans) {
    for (const int arch : {90, 80}) {
      DeviceArrays outputs;
      p.workspace = outputs.workspace<ValueBatch>(p.sequences, plan);
      float** const to[] = {&p.loss, &p.metrics, &p.d_value};
      for (int i = 0; i < 3; ++i) *to[i] = outputs.put_guarded(want[i].size());
      arch == 90 ? sm90::value_loss(p, plan, nullptr) : sm80::value_loss(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "value_loss");
      for (int i = 0; i < 3; ++i) check_of->compare(c.text, plan.tile, arch, i, *to[i], want[i]);
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
      value_test::Case c;
      value_test::make_case(2 * seed + packed, sequences, longest, packed, &c);
      cuda::run_case(c, &check);
    }
  });
  return check.finish();
}
