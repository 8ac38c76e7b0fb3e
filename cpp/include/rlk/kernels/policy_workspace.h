// Where a GPU's passes of a loss over tokens leave what the next one reads.
#pragma once

#include "rlk/kernels/policy_terms.h"

namespace rlk {

// Of a block's sequences; 2^lanes tiles of each are read at a time, so that a block has 64 >> lanes of them.
constexpr int kMostGatherLanes = 6;
inline int gather_lanes(const PolicySequences& q, int tile) {
  const std::int64_t mean = q.packed() && q.num_sequences > 0 ? q.num_tokens / q.num_sequences + 1 : q.num_tokens;
  int lanes = 0;
  while (lanes < kMostGatherLanes && (std::int64_t{1} << lanes) < tiles_of(mean, tile)) ++lanes;
  return lanes;
}
inline std::int64_t gather_blocks(const PolicySequences& q, int lanes) {
  const std::int64_t each = std::int64_t{1} << (kMostGatherLanes - lanes);
  return q.num_sequences == 0 ? 1 : (q.num_sequences + each - 1) / each;
}

// Blocks of each pass. A wave's tile leaves a block as many as it has waves.
struct PolicyPasses {
  bool counts;
  std::int64_t slots, token_blocks, sequence_blocks;
  int lanes;

  template <class Params>
  PolicyPasses(const Params& p, int tile, int wave_tile, int waves)
      : counts(needs_counts(p)),
        slots(p.sequences.num_slots() == 0 ? 0 : workspace_slots(p.sequences, tile)),
        token_blocks(tile == wave_tile ? (slots + waves - 1) / waves : slots),
        lanes(gather_lanes(p.sequences, tile)) {
    sequence_blocks = gather_blocks(p.sequences, lanes);
  }
};
inline std::int64_t scale_blocks(const ScaleGradientsParams& p) {
  constexpr std::int64_t kEach = 1024, kMost = 2048;
  const std::int64_t blocks = (p.count + kEach - 1) / kEach;
  return blocks < kMost ? blocks : kMost;
}

struct PolicyWorkspace {
  PolicyTotals* totals;
  TilePartial<kPolicySums>* partials;  // [slots]: of the pass before, then of tokens
  PolicyFactors* factors;              // [num_sequences]
  PolicyTotalSums* blocks;             // [gather_blocks]
  std::int64_t bytes;

  PolicyWorkspace(const PolicySequences& q, int tile, void* memory) {
    auto* at = static_cast<unsigned char*>(memory);
    std::int64_t used = 0;
    const auto take = [&](std::int64_t size) {
      unsigned char* const part = at + used;
      used += (size + 15) / 16 * 16;
      return part;
    };
    const std::int64_t slots = q.num_slots() == 0 ? 0 : workspace_slots(q, tile);
    totals = reinterpret_cast<PolicyTotals*>(take(sizeof(PolicyTotals)));
    partials = reinterpret_cast<TilePartial<kPolicySums>*>(
        take(slots * static_cast<std::int64_t>(sizeof(TilePartial<kPolicySums>))));
    factors =
        reinterpret_cast<PolicyFactors*>(take(q.num_sequences * static_cast<std::int64_t>(sizeof(PolicyFactors))));
    blocks = reinterpret_cast<PolicyTotalSums*>(
        take(gather_blocks(q, gather_lanes(q, tile)) * static_cast<std::int64_t>(sizeof(PolicyTotalSums))));
    bytes = used;
  }
};

}  // namespace rlk
