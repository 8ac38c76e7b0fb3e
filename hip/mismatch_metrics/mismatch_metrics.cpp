// Host side of the HIP backend of mismatch_metrics: what would corrupt memory, how work is cut, its launches.
#include "mismatch_metrics.h"

#include "hip/common/launch.h"
#include "hip/common/token_tile.h"
#include "rlk/kernels/mismatch_kernels.h"

namespace rlk::hip {

std::int64_t mismatch_metrics_workspace_bytes(const MismatchMetricsParams& p) {
  return MismatchWorkspace(p.sequences, token_tile(p.sequences), nullptr).bytes;
}

void mismatch_metrics(const MismatchMetricsParams& p, int device, Stream stream) {
  check_mismatch_metrics(p);
  RLK_CHECK(p.workspace, "mismatch_metrics: a workspace is given");
  const int tile = token_tile(p.sequences);
  const TokenPasses passes(p.sequences, tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  const MismatchWorkspace w(p.sequences, tile, p.workspace);
  if (passes.token_blocks > 0) {
    launch_blocks(device, stream, {kTokenThreads, sizeof(WaveResults)}, "rlk_mismatch_metrics_tokens",
                  passes.token_blocks, p, w, passes.slots, tile);
  }
  launch_blocks(device, stream, {kGatherThreads, sizeof(BatchSumsShared<MismatchBatch>)}, "rlk_mismatch_metrics_sums",
                passes.sequence_blocks, p, w, tile, passes.lanes, passes.sequence_blocks);
  if (passes.sequence_blocks > 1) {
    launch_blocks(device, stream, {kGatherThreads, sizeof(BatchResultsShared<MismatchBatch>)},
                  "rlk_mismatch_metrics_results", 1, p, w, passes.sequence_blocks);
  }
}

}  // namespace rlk::hip
