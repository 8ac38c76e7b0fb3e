// CUDA backend of policy_loss: what would corrupt memory, how work is cut, which architecture's kernels run.
#include "policy_loss.h"

#include "kernels.h"
#include "rlk/kernels/policy_check.h"

namespace rlk::cuda {
namespace {

constexpr int kWarpTile = 7, kLeastBlockTile = 10, kMostBlockTile = 13;
constexpr std::int64_t kWarpTokens = 256;  // sequences of at most so many are warps

}  // namespace

PolicyPlan choose_plan(const PolicyLossParams& p, int multiprocessors) {
  const PolicySequences& q = p.sequences;
  const std::int64_t mean = q.packed() && q.num_sequences > 0 ? q.num_tokens / q.num_sequences + 1 : q.num_tokens;
  if (mean <= kWarpTokens) return {kWarpTile};
  int tile = kLeastBlockTile;
  while (tile < kMostBlockTile && (std::int64_t{1} << tile) < mean &&
         2 * workspace_slots(q, tile + 1) >= std::int64_t{3} * multiprocessors) {
    ++tile;
  }
  return {tile};
}

std::int64_t policy_loss_workspace_bytes(const PolicyLossParams& p) {
  // Whatever the device, and so the plan: slots are most where tiles are least.
  const PolicySequences& q = p.sequences;
  const std::int64_t mean = q.packed() && q.num_sequences > 0 ? q.num_tokens / q.num_sequences + 1 : q.num_tokens;
  return PolicyWorkspace(q, mean <= kWarpTokens ? kWarpTile : kLeastBlockTile, nullptr).bytes +
         static_cast<std::int64_t>(sizeof(PolicyTotalSums)) * q.num_sequences;
}

void policy_loss(const PolicyLossParams& p, int device, Stream stream) {
  check_policy_loss(p);
  RLK_CHECK(p.workspace, "policy_loss: a workspace is given");
  const DeviceGuard guard(device);
  const int capability = compute_capability(device);
  if (capability < 80) throw Unsupported("policy_loss: built for compute capability 8.0 and later");
  const PolicyPlan plan = choose_plan(p, multiprocessors(device));
  capability == 90 ? policy_loss_sm90(p, plan, to_stream(stream)) : policy_loss_sm80(p, plan, to_stream(stream));
}

void scale_gradients(const ScaleGradientsParams& p, int device, Stream stream) {
  if (p.count == 0) return;
  const DeviceGuard guard(device);
  compute_capability(device) == 90 ? scale_gradients_sm90(p, to_stream(stream))
                                   : scale_gradients_sm80(p, to_stream(stream));
}

}  // namespace rlk::cuda
