// Host side of the HIP backend of policy_loss: what would corrupt memory, how work is cut, its launches.
#include "policy_loss.h"

#include "hip/common/launch.h"
#include "hip/common/token_tile.h"
#include "rlk/kernels/policy_check.h"
#include "rlk/kernels/policy_kernels.h"

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

std::int64_t policy_loss_workspace_bytes(const PolicyLossParams& p) {
  return PolicyWorkspace(p.sequences, token_tile(p.sequences), nullptr).bytes;
}

void policy_loss(const PolicyLossParams& p, int device, Stream stream) {
  check_policy_loss(p);
  RLK_CHECK(p.workspace, "policy_loss: a workspace is given");
  const int tile = token_tile(p.sequences);
  const PolicyPasses passes(p, tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const PolicyWorkspace w(p.sequences, tile, p.workspace);
  const Block tokens = {kTokenThreads, sizeof(WaveResults)};
  if (passes.counts) {
    launch_blocks(device, stream, tokens, "rlk_policy_loss_statistics",
                  passes.token_blocks > 0 ? passes.token_blocks : 1, p, w, passes.slots, tile);
    launch_blocks(device, stream, {kGatherThreads, sizeof(GatheredSums)}, "rlk_policy_loss_sequences",
                  passes.sequence_blocks, p, w, tile, passes.lanes);
  }
  if (passes.token_blocks > 0) {
    launch_blocks(device, stream, tokens, tokens_kernel(p), passes.token_blocks, p, w, passes.slots, tile);
  }
  launch_blocks(device, stream, {kGatherThreads, sizeof(BatchSumsShared<PolicyBatch>)}, "rlk_policy_loss_sums",
                passes.sequence_blocks, p, w, tile, passes.lanes, passes.sequence_blocks);
  if (passes.sequence_blocks > 1) {
    launch_blocks(device, stream, {kGatherThreads, sizeof(BatchResultsShared<PolicyBatch>)}, "rlk_policy_loss_results",
                  1, p, w, passes.sequence_blocks);
  }
}

void scale_gradients(const ScaleGradientsParams& p, int device, Stream stream) {
  if (p.count == 0) return;
  const std::int64_t blocks = scale_blocks(p);
  launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_policy_loss_scale", blocks, p, blocks);
}

}  // namespace rlk::hip
