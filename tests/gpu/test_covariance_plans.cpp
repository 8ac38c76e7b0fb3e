// Every plan of covariance_mask has the CPU's bits, as built for sm_90 and as PTX for sm_80: random batches, padded and
// packed, with guard bands around the output.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/losses/covariance_terms.h"
#include "rlk/backends.h"
#include "rlk/ops/covariance_mask.h"
#include "tests/cpp/covariance_cases.h"
#include "tests/gpu/token_plans.h"

namespace rlk::cuda {
namespace {

void run(covariance_test::Batch* b, PlanCheck* check_of) {
  std::vector<float> want = guarded(b->sequences.num_slots());
  CovarianceMaskParams p = b->params;
  p.selected = want.data();
  cpu::covariance_mask(p);
  DeviceArrays arrays;
  arrays.put(b->arrays[0], &p.logprob.data);
  arrays.put(b->arrays[1], &p.old_logprob.data);
  arrays.put(b->arrays[2], &p.advantage.data);
  arrays.put(*b, &p.sequences, &p.mask);
  for (const TokenPlan& plan : kTokenPlans) {
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      p.selected = memory.put_guarded(want.size());
      p.workspace = memory.workspace<CovarianceBatch>(p.sequences, plan);
      arch == 90 ? sm90::covariance_mask(p, plan, nullptr) : sm80::covariance_mask(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "covariance_mask");
      check_of->compare("selected, " + b->text, plan.tile, arch, 0, p.selected, want);
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
      covariance_test::Batch b(2 * seed + packed, sequences, longest, packed);
      cuda::run(&b, &check);
    }
  });
  return check.finish();
}
