// What of a gae call would corrupt memory, for every backend; the bindings checked what users may get wrong.
#pragma once

#include "rlk/ops/gae.h"

namespace rlk {

inline void check_sequences(const Sequences& q, const TokenMask& mask) {
  RLK_CHECK(q.num_sequences >= 0 && q.num_sequences < std::int64_t{1} << 31, "sequences: fewer than 2^31");
  RLK_CHECK(q.num_tokens >= 0 && q.num_tokens < std::int64_t{1} << 40, "sequences: fewer than 2^40 tokens");
  RLK_CHECK(q.cu_dtype == DType::kInt32 || q.cu_dtype == DType::kInt64, "cu_seqlens: int32 or int64");
  RLK_CHECK(mask.dtype == DType::kBool || mask.dtype == DType::kInt32 || mask.dtype == DType::kInt64 ||
                mask.dtype == DType::kFloat32,
            "mask: bool, int32, int64 or float32");
}

inline void check_gae(const GaeParams& p) {
  check_sequences(p.sequences, p.mask);
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
