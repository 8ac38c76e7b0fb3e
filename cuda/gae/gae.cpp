// CUDA backend of gae: what would corrupt memory, how many warps share a sequence, which architecture's kernel runs.
#include "gae.h"

#include "kernels.h"
#include "rlk/kernels/gae_check.h"

namespace rlk::cuda {
namespace {

constexpr std::int64_t kWarpsWanted = 24;  // of a multiprocessor; fewer, and more warps share a sequence

}  // namespace

GaePlan choose_plan(const GaeParams& p, int multiprocessors) {
  const Sequences& q = p.sequences;
  // Of packed sequences the host does not know the lengths: their mean stands for them.
  const std::int64_t length = q.cu_seqlens == nullptr ? q.num_tokens : q.num_tokens / q.num_sequences + 1;
  for (const GaePlan& plan : kGaePlans) {
    if (q.num_sequences * plan.warps >= kWarpsWanted * multiprocessors || plan.warps * kScanChunk >= length)
      return plan;
  }
  return kGaePlans[4];
}

void gae(const GaeParams& p, int device, Stream stream) {
  check_gae(p);
  if (p.sequences.num_sequences == 0 || p.sequences.num_tokens == 0) return;
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("gae: built for compute capability 8.0 and later");
  const GaePlan plan = choose_plan(p, multiprocessors(device));
  capability == 90 ? gae_sm90(p, plan, to_stream(stream)) : gae_sm80(p, plan, to_stream(stream));
}

}  // namespace rlk::cuda
