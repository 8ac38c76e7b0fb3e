// The host side of scatter_rewards on HIP checks memory safety, splits the work into blocks, and chooses the kernels.
#include "rlk/ops/scatter_rewards.h"

#include "hip/tokens/passes.h"
#include "kernels/advantages/reward_spread.h"
#include "kernels/advantages/reward_zeros.h"
#include "rlk/backends.h"

namespace rlk::hip {

std::int64_t scatter_rewards_workspace_bytes(const ScatterRewardsParams& p, int) {
  return reward_workspace_bytes(p.sequences, token_tile(p.sequences));
}

void scatter_rewards(const ScatterRewardsParams& p, int device, Stream stream) {
  check_scatter_rewards(p);
  const Sequences& q = p.sequences;
  if (q.num_sequences == 0 && q.num_slots() == 0) return;
  const int tile = token_tile(q);
  const TokenPasses passes = token_passes(q);
  RLK_CHECK(passes.slots < std::int64_t{1} << 31, "scatter_rewards: too many tokens for one launch");
  const bool blank = are_blank<TokenGpu>(p, tile), by_blocks = spreads_by_blocks<TokenGpu>(p, tile);
  if (passes.token_blocks > 0 && !(blank && by_blocks)) {
    RLK_CHECK(p.workspace, "scatter_rewards: a workspace is given");
    if (blank) {
      launch_blocks(device, stream, {kTokenThreads, sizeof(BlanksShared)}, "rlk_scatter_rewards_blanks",
                    passes.token_blocks, p, tile);
    } else {
      launch_blocks(device, stream, {kTokenThreads, sizeof(WaveResults)}, "rlk_scatter_rewards_tokens",
                    passes.token_blocks, p, passes.slots, tile);
    }
  }
  if (by_blocks) {
    constexpr int kPartTile = 13;
    const int parts = spread_parts(q, kPartTile);
    if (blank) launch_blocks(device, stream, {kTokenThreads, 0}, "rlk_scatter_rewards_rest", rest_blocks(q), p);
    launch_blocks(device, stream, {kTokenThreads, sizeof(SpreadShared)}, "rlk_scatter_rewards_spread_blocks",
                  q.num_sequences * parts, p, parts, !blank);
    return;
  }
  if (q.num_sequences == 0) return;
  const char* const sequences = spreads(p) ? "rlk_scatter_rewards_spread" : "rlk_scatter_rewards_sequences";
  launch_blocks(device, stream, {kTokenThreads, 0}, sequences, reward_blocks<TokenGpu>(q), p, tile);
}

}  // namespace rlk::hip
