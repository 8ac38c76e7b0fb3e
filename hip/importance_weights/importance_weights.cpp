// Host side of the HIP backend of importance_weights: what would corrupt memory, how work is cut, its launches.
#include "importance_weights.h"

#include "hip/common/launch.h"
#include "hip/common/token_tile.h"
#include "rlk/kernels/importance_kernels.h"

namespace rlk::hip {

std::int64_t importance_weights_workspace_bytes(const ImportanceWeightsParams& p) {
  return ImportanceWorkspace(p.sequences, token_tile(p.sequences), nullptr).bytes;
}

void importance_weights(const ImportanceWeightsParams& p, int device, Stream stream) {
  check_importance_weights(p);
  RLK_CHECK(p.workspace, "importance_weights: a workspace is given");
  const int tile = token_tile(p.sequences);
  const TokenPasses passes(p.sequences, tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const ImportanceWorkspace w(p.sequences, tile, p.workspace);
  if (passes.token_blocks == 0) return;
  const Block tokens = {kTokenThreads, sizeof(WaveResults)};
  if (needs_statistics(p.spec)) {
    launch_blocks(device, stream, tokens, "rlk_importance_weights_statistics", passes.token_blocks, p, w, passes.slots,
                  tile);
    launch_blocks(device, stream, {kGatherThreads, sizeof(GatheredSums)}, "rlk_importance_weights_sequences",
                  passes.sequence_blocks, p, w, tile, passes.lanes);
  }
  launch_blocks(device, stream, tokens, "rlk_importance_weights_tokens", passes.token_blocks, p, w, passes.slots, tile);
  if (p.spec.normalize == 0) return;
  launch_blocks(device, stream, {kGatherThreads, sizeof(BatchSumsShared<ImportanceBatch>)},
                "rlk_importance_weights_sums", passes.sequence_blocks, p, w, tile, passes.lanes,
                passes.sequence_blocks);
  if (passes.sequence_blocks > 1) {
    launch_blocks(device, stream, {kGatherThreads, sizeof(BatchResultsShared<ImportanceBatch>)},
                  "rlk_importance_weights_results", 1, p, w, passes.sequence_blocks);
  }
  const std::int64_t count = p.sequences.num_slots(), blocks = map_blocks(count);
  launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_importance_weights_divide", blocks, p, w, count, blocks);
}

}  // namespace rlk::hip
