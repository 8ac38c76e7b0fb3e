// Every plan of value_loss has the CPU's bits, as built for sm_90 and for sm_80, whose PTX runs here: random calls, padded
// and packed, with guard bands around every output.
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "cpp/cpu/value_loss.h"
#include "cuda/value_loss/kernels.h"
#include "cuda/value_loss/value_loss.h"
#include "tests/gpu/token_plans.h"
#include "tests/value_loss_cases.h"

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
  PolicyTokens* const arrays[] = {&p.value, &p.old_value, &p.returns};
  for (int k = 0; k < value_test::kArrays; ++k) device.put(c.arrays[k], &arrays[k]->data);
  if (p.mask.data != nullptr) p.mask.data = device.put(c.mask.data(), c.mask.size());
  if (p.sequences.packed()) {
    p.sequences.cu_seqlens = p.sequences.cu_dtype == DType::kInt64 ? device.put(c.cuts64.data(), c.cuts64.size() * 8)
                                                                   : device.put(c.cuts32.data(), c.cuts32.size() * 4);
  }
  const std::vector<unsigned char> garbage(static_cast<std::size_t>(value_loss_workspace_bytes(p)) + (1 << 20), 0xcd);
  for (const PolicyPlan& plan : kPolicyPlans) {
    if (plan.tile == kWarpTile && slots > 200000) continue;  // more slots than the workspace here
    for (const int arch : {90, 80}) {
      DeviceArrays outputs;
      p.workspace = outputs.put(garbage.data(), garbage.size());
      float** const to[] = {&p.loss, &p.metrics, &p.d_value};
      for (int i = 0; i < 3; ++i) *to[i] = outputs.put_guarded(want[i].size());
      arch == 90 ? value_loss_sm90(p, plan, nullptr) : value_loss_sm80(p, plan, nullptr);
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
  // No sequence; no token; one; short; more sequences than a block sums; one tile and a token; many tiles.
  constexpr std::int64_t kShapes[][2] = {{0, 7},     {3, 0},    {1, 1},     {5, 13},    {70, 3},
                                         {300, 129}, {9, 256},  {2, 1025},  {33, 2048}, {1, 9000},
                                         {130, 40},  {4, 8193}, {2, 20000}, {1, 70000}};
  unsigned seed = 1;
  cuda::PlanCheck check;
  for (const auto& shape : kShapes) {
    for (const bool packed : {false, true}) {
      for (int i = 0; i < (shape[0] * shape[1] > 30000 ? 6 : 25); ++i) {
        value_test::Case c;
        value_test::make_case(seed++, shape[0], shape[1], packed, &c);
        cuda::run_case(c, &check);
      }
    }
  }
  return check.finish();
}
