// Every plan of scatter_rewards has the CPU's bits, as built for sm_90 and as PTX for sm_80. Batches are random, padded
// or packed, and guard bands surround every output. Rewards are spread over spans of every kind, invalid ones included.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/kernels.h"
#include "kernels/advantages/reward_sequence.h"
#include "kernels/advantages/reward_terms.h"
#include "rlk/backends.h"
#include "rlk/ops/scatter_rewards.h"
#include "tests/cpp/reward_cases.h"
#include "tests/gpu/token_plans.h"

namespace rlk::cuda {
namespace {

// The call on the device; outputs are not set.
struct There {
  ScatterRewardsParams p;
  DeviceArrays arrays;

  explicit There(const reward_test::Case& c) : p(c.call) {
    arrays.put(c, &p.sequences, &p.mask);
    arrays.put(c.arrays[2], &p.token_rewards.data);
    arrays.put(c.arrays[0], &p.logprob.data);
    arrays.put(c.arrays[4], &p.ref_logprob.data);
    arrays.put(c.rewards, &p.rewards.data);
    arrays.put(c.cost, &p.cost.data);
    arrays.put(c.span_rewards, &p.span_rewards);
    if (p.lagrange != nullptr) p.lagrange = static_cast<const float*>(arrays.put(&c.lagrange, sizeof(float)));
    put(c.spans32, c.spans64, &p.spans);
    put(c.span_offsets32, c.span_offsets64, &p.span_offsets);
  }

 private:
  void put(const std::vector<std::int32_t>& narrow, const std::vector<std::int64_t>& wide, Offsets* to) {
    if (to->data == nullptr) return;
    to->data = to->dtype == DType::kInt64 ? arrays.put(wide.data(), wide.size() * sizeof(std::int64_t))
                                          : arrays.put(narrow.data(), narrow.size() * sizeof(std::int32_t));
  }
};

// Compares the GPU's result of `on_gpu` with the CPU's of `c`. The first output lies `shift` elements off a multiple of
// 16 bytes, and each next output another `more` elements further.
void run_case(const reward_test::Case& c, const reward_test::Case& on_gpu, int shift, int more, PlanCheck* check_of) {
  const std::int64_t slots = c.sequences.num_slots();
  // Lengths are compared as two 32-bit halves.
  std::vector<float> want[] = {guarded(slots), guarded(slots), guarded(slots), guarded(2 * c.sequences.num_sequences)};
  const auto put = [](ScatterRewardsParams* p, float* const(&to)[4]) {
    p->to_tokens = to[0];
    p->costs = to[1];
    p->combined = to[2];
    p->lengths = reinterpret_cast<std::int64_t*>(to[3]);
  };
  ScatterRewardsParams here = c.call;
  put(&here, {want[0].data(), want[1].data(), want[2].data(), want[3].data()});
  cpu::scatter_rewards(here);
  const There there(on_gpu);
  for (const TokenPlan& plan : kTokenPlans) {
    for (const int arch : {90, 80}) {
      DeviceArrays memory;
      float* to[4];
      for (int i = 0; i < 4; ++i) to[i] = memory.put_guarded(want[i].size() + 9) + (i < 3 ? shift + i * more : 0);
      ScatterRewardsParams p = there.p;
      put(&p, to);
      const auto bytes = static_cast<std::size_t>(reward_workspace_bytes(p.sequences, plan.tile));
      const std::vector<unsigned char> garbage(bytes, 0xcd);
      p.workspace = memory.put(garbage.data(), bytes);
      arch == 90 ? sm90::scatter_rewards(p, plan, nullptr) : sm80::scatter_rewards(p, plan, nullptr);
      check(cudaDeviceSynchronize(), "scatter_rewards");
      for (int i = 0; i < 4; ++i) check_of->compare(c.text, plan.tile, arch, i, to[i], want[i]);
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
      const reward_test::Case c(2 * seed + packed, sequences, longest, packed);
      cuda::run_case(c, c, 0, 0, &check);
      const reward_test::SpreadCase spread(2 * seed + packed, sequences, longest, packed);
      const reward_test::SpreadCase bad(2 * seed + packed, sequences, longest, packed, true);
      const int shift = static_cast<int>(seed % 4), more = static_cast<int>(seed / 4 % 2);
      cuda::run_case(spread, spread, shift, more, &check);
      cuda::run_case(spread, bad, shift, more, &check);
    }
  });
  return check.finish();
}
