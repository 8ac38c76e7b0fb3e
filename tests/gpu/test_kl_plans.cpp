// Every plan of kl has the CPU's bits, as built for sm_90 and as PTX for sm_80. Calls are random, rows have gaps or
// none, and guard bands surround every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <iterator>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/losses/kl_check.h"
#include "rlk/backends.h"
#include "rlk/ops/kl.h"
#include "tests/cpp/kl_cases.h"
#include "tests/gpu/token_plans.h"

namespace rlk::cuda {
namespace {

void run_case(kl_test::Case& c, PlanCheck* check_of) {
  KlParams p = c.p;
  const std::int64_t slots = p.sequences.num_slots();
  const int outputs = p.spec.weight == KlWeight::kImportance ? 3 : 2;
  std::vector<float> want[] = {guarded(slots), guarded(slots), guarded(slots)};
  float** const to[] = {&p.kl, &p.d_logprob, &p.d_importance_weight};
  for (int i = 0; i < outputs; ++i) *to[i] = want[i].data();
  cpu::kl(p);

  DeviceArrays device;
  PolicyTokens* const arrays[] = {&p.logprob, &p.ref_logprob, &p.weight, &p.d_kl};
  for (int k = 0; k < kl_test::kArrays; ++k) device.put(c.arrays[k], &arrays[k]->data);
  if (p.mask.data != nullptr) p.mask.data = device.put(c.mask.data(), c.mask.size());
  constexpr int kChosen = -1;  // the entry point's own choice, which joins rows without gaps
  std::vector<TokenPlan> plans(std::begin(kTokenPlans), std::end(kTokenPlans));
  if (slots == 0) plans.clear();
  plans.push_back({kChosen});
  for (const TokenPlan& plan : plans) {
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      for (int i = 0; i < outputs; ++i) *to[i] = memory.put_guarded(want[i].size());
      if (plan.tile == kChosen) {
        kl(p, 0, 0);
      } else {
        arch == 90 ? sm90::kl(p, plan, nullptr) : sm80::kl(p, plan, nullptr);
      }
      check(cudaDeviceSynchronize(), "kl");
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
  cuda::for_each_plan_case([&](unsigned seed, std::int64_t rows, std::int64_t tokens) {
    kl_test::Case c;
    kl_test::make_case(seed, rows, tokens, &c);
    cuda::run_case(c, &check);
  });
  return check.finish();
}
