// The host side of importance_weights on HIP checks memory safety and chooses the kernels.
#include "rlk/ops/importance_weights.h"

#include "hip/tokens/passes.h"
#include "kernels/losses/rejection_terms.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t importance_weights_workspace_bytes(const ImportanceWeightsParams& p, int) {
  return token_workspace<ImportanceBatch>(p.sequences, nullptr).bytes;
}

void importance_weights(const ImportanceWeightsParams& p, int device, Stream stream) {
  check_importance_weights(p);
  RLK_CHECK(p.workspace, "importance_weights: a workspace is given");
  const std::int64_t count = p.sequences.num_slots(), blocks = map_blocks(count);
  if (count == 0 && p.metrics == nullptr) return;
  const ImportanceForm form = form_of(p);
  const char* const terms = form == ImportanceForm::kAlone        ? "rlk_importance_weights_tokens"
                            : form == ImportanceForm::kNormalized ? "rlk_importance_weights_tokens_normalized"
                                                                  : "rlk_importance_weights_tokens_measured";
  run_token_passes<ImportanceBatch>(p, device, stream, "rlk_importance_weights", terms);
  if (p.metrics != nullptr) {
    run_token_passes<ImportanceMomentsBatch>(p, device, stream, "rlk_importance_weights_moments",
                                             "rlk_importance_weights_moments_tokens");
  }
  if (p.spec.normalize == 0 || count == 0) return;
  launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_importance_weights_divide", blocks, p,
                token_workspace<ImportanceBatch>(p.sequences, p.workspace), count, blocks);
}

}  // namespace rlk::hip
