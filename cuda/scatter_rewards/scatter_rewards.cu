// scatter_rewards: a first kernel writes every token, and stores for each tile how many tokens count. In a second
// kernel, each warp processes one sequence and adds rewards to the tokens that have a reward. All architectures share
// this source; each has its own machine code. Bound by HBM: each array is read or written once. The second kernel reads
// 64 bytes per tile and touches only tokens that have a reward.
#include "../common/dependent_launch.cuh"
#include "../common/kernels.h"
#include "../common/vec8.cuh"
#include "../tokens/gpu.cuh"
#include "kernels/advantages/reward_spread.h"
#include "kernels/advantages/reward_terms.h"
#include "kernels/advantages/reward_zeros.h"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

// Prefetches the mask of a block's tile. With one byte per token, a warp's loads are too small to keep enough bytes in
// flight.
__device__ __forceinline__ void prefetch_mask(const ScatterRewardsParams& p, int tile) {
  const Sequences& q = p.sequences;
  if (q.packed() || p.mask.data == nullptr || tile == kWarpTile) return;
  const std::int64_t s = sequence_of_slot(q, blockIdx.x, tile);
  const std::int64_t first = (blockIdx.x - first_slot(q, s, tile)) << tile, left = q.num_tokens - first;
  const int bytes = p.mask.bytes, count = left < 1 << tile ? static_cast<int>(left) : 1 << tile;
  const char* const from = static_cast<const char*>(p.mask.data) + (s * p.mask.row_stride + first) * bytes;
  const std::uint32_t whole = static_cast<std::uint32_t>(count * bytes) / 16 * 16;
  if (whole > 0 && is_aligned(from, 16)) prefetch_to_l2(from, whole);
}

__global__ void __launch_bounds__(kTokenThreads, 3)
    reward_tokens_kernel(const __grid_constant__ ScatterRewardsParams p, std::int64_t slots, int tile) {
  __shared__ WaveResults shared;
  wait_for_previous_kernel();
  if (threadIdx.x == 0) prefetch_mask(p, tile);
  reward_tokens<TokenGpu>(p, static_cast<TilePartial<8>*>(p.workspace), slots, tile, blockIdx.x, &shared);
  allow_next_kernel();
}

__global__ void __launch_bounds__(kTokenThreads, 4)
    reward_blanks_kernel(const __grid_constant__ ScatterRewardsParams p, int tile) {
  __shared__ BlanksShared shared;
  wait_for_previous_kernel();
  blank_tokens<TokenGpu>(p, static_cast<TilePartial<8>*>(p.workspace), tile, blockIdx.x, &shared);
  allow_next_kernel();
}

template <bool kSpreads>
__global__ void __launch_bounds__(kTokenThreads, (kSpreads ? 3 : 4))
    reward_sequences_kernel(const __grid_constant__ ScatterRewardsParams p, int tile) {
  wait_for_previous_kernel();
  reward_sequences<TokenGpu, kSpreads>(p, static_cast<const TilePartial<8>*>(p.workspace), tile, blockIdx.x);
}

// Only packed calls launch this kernel. As a part of the spread kernel, this code would spill registers.
__global__ void reward_rest_kernel(const __grid_constant__ ScatterRewardsParams p) {
  wait_for_previous_kernel();
  clear_spread_rest<TokenGpu>(p, blockIdx.x);
}

__global__ void __launch_bounds__(kTokenThreads, 5)
    reward_spread_kernel(const __grid_constant__ ScatterRewardsParams p, int parts, bool are_written) {
  __shared__ SpreadShared shared;
  wait_for_previous_kernel();
  spread_rewards<TokenGpu>(p, blockIdx.x, parts, are_written, &shared);
}

}  // namespace
}  // namespace rlk::cuda

namespace rlk::cuda::RLK_CUDA_ARCH {

void scatter_rewards(const ScatterRewardsParams& p, const TokenPlan& plan, cudaStream_t stream) {
  const Sequences& q = p.sequences;
  if (q.num_sequences == 0 && q.num_slots() == 0) return;
  const TokenPasses passes(q, plan.tile, kWaveTile<TokenGpu>, kTokenWaves<TokenGpu>);
  RLK_CHECK(passes.slots < std::int64_t{1} << 31, "scatter_rewards: too many tokens for one launch");
  const int token_blocks = static_cast<int>(passes.token_blocks), tile = plan.tile;
  const bool blank = are_blank<TokenGpu>(p, tile), by_blocks = spreads_by_blocks<TokenGpu>(p, tile);
  if (token_blocks > 0 && !(blank && by_blocks)) {
    blank ? launch_dependent<kOverlap>(reward_blanks_kernel, token_blocks, kTokenThreads, 0, stream, p, tile)
          : launch_dependent<kOverlap>(reward_tokens_kernel, token_blocks, kTokenThreads, 0, stream, p, passes.slots,
                                       tile);
  }
  if (by_blocks) {
    const int parts = spread_parts(q, tile);
    const std::int64_t blocks = q.num_sequences * parts;
    RLK_CHECK(blocks < std::int64_t{1} << 31, "scatter_rewards: too many sequences for one launch");
    if (blank && q.packed()) {
      launch_dependent<kOverlap>(reward_rest_kernel, static_cast<int>(rest_blocks(q)), kTokenThreads, 0, stream, p);
    }
    if (blocks == 0) return;
    launch_dependent<kOverlap>(reward_spread_kernel, static_cast<int>(blocks), kTokenThreads, 0, stream, p, parts,
                               !blank);
    return;
  }
  if (q.num_sequences == 0) return;
  launch_dependent<kOverlap>(spreads(p) ? reward_sequences_kernel<true> : reward_sequences_kernel<false>,
                             static_cast<int>(reward_blocks<TokenGpu>(q)), kTokenThreads, 0, stream, p, tile);
}

}  // namespace rlk::cuda::RLK_CUDA_ARCH
