// The kernels of scatter_rewards under the names that the host looks up. The kernels are compiled for gfx90a and
// gfx942, and for the emulation.
#include "hip/tokens/gpu.h"
#include "kernels/advantages/reward_spread.h"
#include "kernels/advantages/reward_zeros.h"

RLK_KERNEL(rlk::kTokenThreads)
rlk_scatter_rewards_tokens(rlk::ScatterRewardsParams p, std::int64_t first_block, std::int64_t slots, int tile) {
  rlk::reward_tokens<rlk::hip::TokenGpu>(p, static_cast<rlk::TilePartial<8>*>(p.workspace), slots, tile,
                                         first_block + rlk::hip::block_id_x(),
                                         rlk::hip::TokenGpu::shared<rlk::WaveResults>());
}

RLK_KERNEL(rlk::kTokenThreads)
rlk_scatter_rewards_blanks(rlk::ScatterRewardsParams p, std::int64_t first_block, int tile) {
  rlk::blank_tokens<rlk::hip::TokenGpu>(p, static_cast<rlk::TilePartial<8>*>(p.workspace), tile,
                                        first_block + rlk::hip::block_id_x(),
                                        rlk::hip::TokenGpu::shared<rlk::BlanksShared>());
}

RLK_KERNEL(rlk::kTokenThreads)
rlk_scatter_rewards_sequences(rlk::ScatterRewardsParams p, std::int64_t first_block, int tile) {
  rlk::reward_sequences<rlk::hip::TokenGpu, false>(p, static_cast<const rlk::TilePartial<8>*>(p.workspace), tile,
                                                   first_block + rlk::hip::block_id_x());
}

RLK_KERNEL(rlk::kTokenThreads)
rlk_scatter_rewards_spread(rlk::ScatterRewardsParams p, std::int64_t first_block, int tile) {
  rlk::reward_sequences<rlk::hip::TokenGpu, true>(p, static_cast<const rlk::TilePartial<8>*>(p.workspace), tile,
                                                  first_block + rlk::hip::block_id_x());
}

RLK_KERNEL(rlk::kTokenThreads)
rlk_scatter_rewards_spread_blocks(rlk::ScatterRewardsParams p, std::int64_t first_block, int parts, bool are_written) {
  rlk::spread_rewards<rlk::hip::TokenGpu>(p, first_block + rlk::hip::block_id_x(), parts, are_written,
                                          rlk::hip::TokenGpu::shared<rlk::SpreadShared>());
}

// This kernel could be a part of the kernel above. But then the compiler would no longer know which pointers of that
// kernel point to global memory.
RLK_KERNEL(rlk::kTokenThreads)
rlk_scatter_rewards_rest(rlk::ScatterRewardsParams p, std::int64_t first_block) {
  rlk::clear_spread_rest<rlk::hip::TokenGpu>(p, first_block + rlk::hip::block_id_x());
}
