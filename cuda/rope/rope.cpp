// CUDA backend of rope: checks of memory safety, the kernel that serves a call, and the architecture that runs it.
#include "rlk/ops/rope.h"

#include "kernels.h"
#include "rlk/backends.h"
#include "rlk/kernels/rope_check.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kThreadsWanted = 2048;  // threads per multiprocessor; with fewer, a thread takes fewer heads

}  // namespace

bool serves(const RopePlan& plan, const RopeParams& p) {
  if (plan.heads == 0) return true;
  return rope_has_vec8s(p) && (plan.heads < 4 || p.dtype != DType::kFloat32);
}

RopePlan choose_plan(const RopeParams& p, int multiprocessors) {
  for (const RopePlan& plan : kRopePlans) {
    if (!serves(plan, p)) continue;
    if (plan.heads <= 1) return plan;
    RopeGrid g;
    rope_grid(p, true, plan.heads, kRopeThreads, 0, &g);
    const std::int64_t threads = std::int64_t{g.slots} * g.units;
    if (plan.heads <= p.q.num_heads + p.k.num_heads && threads >= kThreadsWanted * multiprocessors) return plan;
  }
  return {};
}

void rope(const RopeParams& p, int device, Stream stream) {
  check_rope(p);
  if (p.num_tokens == 0 || p.head_dim == 0 || p.q.num_heads + p.k.num_heads == 0) return;
  const DeviceGuard guard(device);
  const RopePlan plan = choose_plan(p, multiprocessors(device));
  RLK_CUDA_IN_USE("rope", device, rope)(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
