// The host side of policy_loss on HIP checks memory safety and chooses the kernels.
#include "rlk/ops/policy_loss.h"

#include "hip/tokens/passes.h"
#include "kernels/losses/policy_batch.h"
#include "kernels/losses/policy_check.h"
#include "rlk/backends.h"

namespace rlk::hip {
namespace {

const char* tokens_kernel(const PolicyLossParams& p) {
  switch (form_of(p)) {
    case PolicyForm::kClipped:
      return "rlk_policy_loss_tokens_clipped";
    case PolicyForm::kTokens:
      return "rlk_policy_loss_tokens_any";
    case PolicyForm::kSequences:
      break;
  }
  return "rlk_policy_loss_tokens_sequences";
}

}  // namespace

std::int64_t policy_loss_alone_workspace_bytes(const PolicyLossParams& p, int) {
  return token_workspace<PolicyBatch>(p.sequences, nullptr).bytes;
}

void policy_loss_alone(const PolicyLossParams& p, int device, Stream stream) {
  check_policy_loss(p);
  RLK_CHECK(p.workspace, "policy_loss: a workspace is given");
  run_token_passes<PolicyBatch>(p, device, stream, "rlk_policy_loss", tokens_kernel(p));
}

void scale_gradients(const ScaleGradientsParams& p, int device, Stream stream) {
  check_scale_gradients(p);
  if (p.count == 0) return;
  const std::int64_t blocks = map_blocks(p.count);
  launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_policy_loss_scale", blocks, p, blocks);
}

}  // namespace rlk::hip
