// The kernels of importance_weights by the names that the host looks up. Compiled for gfx90a and gfx942, and for the
// emulation.
#include "hip/common/token_gpu.h"
#include "rlk/kernels/importance_kernels.h"

#define RLK_IMPORTANCE_KERNEL(name, threads) \
  RLK_KERNEL(threads)                        \
  rlk_importance_weights_##name(rlk::ImportanceWeightsParams p, std::int64_t first_block, rlk::ImportanceWorkspace w
#define RLK_IMPORTANCE_SHARED(type) rlk::hip::TokenGpu::shared<rlk::type>()

RLK_IMPORTANCE_KERNEL(statistics, rlk::kTokenThreads), std::int64_t slots, int tile) {
  rlk::importance_statistics<rlk::hip::TokenGpu>(p, w, slots, tile, first_block + rlk::hip::block_id_x(),
                                                 RLK_IMPORTANCE_SHARED(WaveResults));
}
RLK_IMPORTANCE_KERNEL(sequences, rlk::kGatherThreads), int tile, int lanes) {
  rlk::importance_sequences<rlk::hip::TokenGpu>(p, w, tile, lanes, first_block + rlk::hip::block_id_x(),
                                                RLK_IMPORTANCE_SHARED(GatheredSums));
}
RLK_IMPORTANCE_KERNEL(tokens, rlk::kTokenThreads), std::int64_t slots, int tile) {
  rlk::importance_tokens<rlk::hip::TokenGpu>(p, w, slots, tile, first_block + rlk::hip::block_id_x(),
                                             RLK_IMPORTANCE_SHARED(WaveResults));
}
RLK_IMPORTANCE_KERNEL(sums, rlk::kGatherThreads), int tile, int lanes, std::int64_t num_blocks) {
  rlk::importance_sums<rlk::hip::TokenGpu>(p, w, tile, lanes, num_blocks, first_block + rlk::hip::block_id_x(),
                                           RLK_IMPORTANCE_SHARED(BatchSumsShared<rlk::ImportanceBatch>));
}
RLK_IMPORTANCE_KERNEL(results, rlk::kGatherThreads), std::int64_t num_blocks) {
  static_cast<void>(first_block);
  rlk::importance_results<rlk::hip::TokenGpu>(p, w, num_blocks,
                                              RLK_IMPORTANCE_SHARED(BatchResultsShared<rlk::ImportanceBatch>));
}
RLK_IMPORTANCE_KERNEL(divide, rlk::kTokenThreads), std::int64_t count, std::int64_t blocks) {
  rlk::importance_divide<rlk::hip::TokenGpu>(p, w, count, first_block + rlk::hip::block_id_x(), blocks);
}
