// CPU backend of the operator `scatter_rewards`: spreads tiles of tokens, then sequences, over threads.
#include "rlk/ops/scatter_rewards.h"

#include "kernels/advantages/reward_sequence.h"
#include "rlk/backends.h"
#include "scatter_rewards_simd.h"
#include "span_check.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const ScatterRewardsLanes& lanes() { return RLK_CPU_LANES_IN_USE(scatter_rewards_simd); }

// Stands for a GPU whose waves have a single lane, in functions of kernels/ that a wave runs.
struct Alone {
  static constexpr int kLanes = 1;
  using Tokens = float;
  static const ScatterRewardsParams& first_argument(const ScatterRewardsParams& p) { return p; }
  static int thread() { return 0; }
  static float shuffle_xor(float x, int) { return x; }
  static void wave_barrier() {}
  static std::uint32_t max_over_wave(std::uint32_t x) { return x; }
};

}  // namespace

void scatter_rewards(const ScatterRewardsParams& p) {
  check_scatter_rewards(p);
  const Sequences& q = p.sequences;
  check_offset_values(q);
  if (p.span_offsets.data != nullptr) {
    check_spans(p.spans, p.span_offsets, p.num_spans, q.num_sequences,
                [&](std::int64_t s) { return span_of(q, s).length; });
  }
  std::vector<TilePartial<8>> partials = partials_of(q);
  for_each_tile(q, [&](const TokenTile& tile, std::int64_t slot) {
    lanes().terms(p, tile, &partials[static_cast<std::size_t>(slot)]);
  });
  clear_rest(q, {p.to_tokens, p.costs, p.combined});
  constexpr std::int64_t kTaskSequences = 64;
  parallel_for(q.num_sequences, kTaskSequences, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    for (std::int64_t s = begin; s < end; ++s) {
      spreads(p) ? RewardSequence<Alone, true>(p, s).run(partials.data(), kTile)
                 : RewardSequence<Alone, false>(p, s).run(partials.data(), kTile);
    }
  });
}

}  // namespace rlk::cpu
