// Every backend checks these preconditions of a gae call, because a violation would corrupt memory. Users' input is
// checked earlier, by the bindings.
#pragma once

#include "rlk/ops/gae.h"
#include "rlk/tokens.h"

namespace rlk {

inline void check_gae(const GaeParams& p) {
  check_sequences(p.sequences, p.mask);
  RLK_CHECK(p.sequences.num_tokens < std::int64_t{kScanChunk} << 31, "gae: fewer than 2^38 tokens");  // at most 2^31
                                                                                                      // chunks
  if (p.sequences.num_sequences == 0 || p.sequences.num_tokens == 0) return;
  RLK_CHECK(p.rewards.data != nullptr && p.returns.data != nullptr, "gae: rewards and returns are given");
  if (p.kind != GaeKind::kDiscountedReturns) {
    RLK_CHECK(p.values.data != nullptr && p.advantages.data != nullptr, "gae: values and advantages are given");
  }
  if (p.kind == GaeKind::kVtrace) {
    RLK_CHECK(p.logprob.data != nullptr && p.rollout_logprob.data != nullptr, "vtrace: log-probabilities are given");
  }
}

}  // namespace rlk
