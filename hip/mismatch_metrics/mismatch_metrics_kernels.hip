// The kernels of mismatch_metrics by the names that the host looks up. Compiled for gfx90a and gfx942, and for the emulation.
#include "hip/common/token_gpu.h"
#include "rlk/kernels/mismatch_kernels.h"

#define RLK_MISMATCH_KERNEL(name, threads) \
  RLK_KERNEL(threads)                      \
  rlk_mismatch_metrics_##name(rlk::MismatchMetricsParams p, std::int64_t first_block, rlk::MismatchWorkspace w
#define RLK_MISMATCH_SHARED(type) rlk::hip::TokenGpu::shared<rlk::type>()

RLK_MISMATCH_KERNEL(tokens, rlk::kTokenThreads), std::int64_t slots, int tile) {
  rlk::mismatch_tokens<rlk::hip::TokenGpu>(p, w, slots, tile, first_block + rlk::hip::block_id_x(),
                                           RLK_MISMATCH_SHARED(WaveResults));
}
RLK_MISMATCH_KERNEL(sums, rlk::kGatherThreads), int tile, int lanes, std::int64_t num_blocks) {
  rlk::mismatch_sums<rlk::hip::TokenGpu>(p, w, tile, lanes, num_blocks, first_block + rlk::hip::block_id_x(),
                                         RLK_MISMATCH_SHARED(BatchSumsShared<rlk::MismatchBatch>));
}
RLK_MISMATCH_KERNEL(results, rlk::kGatherThreads), std::int64_t num_blocks) {
  static_cast<void>(first_block);
  rlk::mismatch_results<rlk::hip::TokenGpu>(p, w, num_blocks,
                                            RLK_MISMATCH_SHARED(BatchResultsShared<rlk::MismatchBatch>));
}
