// Where a GPU's passes of policy_loss leave what the next one reads.
#pragma once

#include "rlk/kernels/policy_terms.h"
#include "rlk/kernels/token_workspace.h"

namespace rlk {

struct PolicyPasses : TokenPasses {
  bool counts;
  PolicyPasses(const PolicyLossParams& p, int tile, int wave_tile, int waves)
      : TokenPasses(p.sequences, tile, wave_tile, waves), counts(needs_counts(p)) {}
};
inline std::int64_t scale_blocks(const ScaleGradientsParams& p) { return map_blocks(p.count); }

struct PolicyWorkspace {
  PolicyTotals* totals;
  TilePartial<kPolicySums>* partials;  // [slots]: of the pass before, then of tokens
  PolicyFactors* factors;              // [num_sequences]
  PolicyTotalSums* blocks;             // [gather_blocks]
  std::int64_t bytes;

  PolicyWorkspace(const PolicySequences& q, int tile, void* memory) {
    WorkspaceParts parts(memory);
    totals = parts.take<PolicyTotals>(1);
    partials = parts.take<TilePartial<kPolicySums>>(slots_of(q, tile));
    factors = parts.take<PolicyFactors>(q.num_sequences);
    blocks = parts.take<PolicyTotalSums>(gather_blocks(q, gather_lanes(q, tile)));
    bytes = parts.bytes();
  }
};

}  // namespace rlk
