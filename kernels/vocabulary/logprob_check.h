// Every backend checks these preconditions of a logprob call, because a violation would corrupt memory. Users' input is
// checked earlier, by the bindings.
#pragma once

#include <bit>

#include "rlk/ops/logprob.h"

namespace rlk {

inline void check_logprob_input(const LogprobInput& p) {
  RLK_CHECK(p.num_rows >= 0 && p.num_columns >= 0, "logprob: sizes are not negative");
  RLK_CHECK(p.num_rows < std::int64_t{1} << 32, "logprob: fewer than 2^32 rows");
  RLK_CHECK(p.num_rows == 0 || p.target, "logprob: target is given");
  RLK_CHECK(p.num_rows == 0 || p.num_columns == 0 || p.logits, "logprob: logits are given");
  RLK_CHECK(p.logits_rows.inner > 0 && p.target_rows.inner > 0, "logprob: row layouts have inner >= 1");
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "logprob: logits are float32, bfloat16 or float16");
  RLK_CHECK(p.target_dtype == DType::kInt32 || p.target_dtype == DType::kInt64, "logprob: target is int32 or int64");
  RLK_CHECK(p.valid_vocab >= 0 && p.valid_vocab <= p.vocab_size, "logprob: 0 <= valid_vocab <= vocab_size");
  RLK_CHECK(p.vocab_start >= 0, "logprob: vocab_start is not negative");
  RLK_CHECK(p.kept_size >= 0 && (p.kept_ids || p.kept_size == 0) && (p.kept_offsets || !p.kept_ids),
            "logprob: kept_ids and kept_offsets come together");
  RLK_CHECK(p.label_smoothing >= 0.0f && p.label_smoothing < 1.0f, "logprob: label_smoothing is in [0, 1)");
  RLK_CHECK(p.label_smoothing == 0.0f || !p.kept_offsets, "logprob: label_smoothing takes no kept sets");
}

inline void check_logprob_smoothing(const LogprobParams& p) {
  if (p.label_smoothing == 0.0f) return;
  RLK_CHECK(p.stats || (p.logprob && p.lse), "logprob: label_smoothing is of logprob and lse");
  RLK_CHECK(!p.entropy && !p.sum_p_sq, "logprob: label_smoothing gives no entropy and no sum_p_sq");
}

inline void check_logprob_merge(const LogprobMergeParams& p) {
  RLK_CHECK(std::has_single_bit(static_cast<unsigned>(p.num_shards)) && p.num_shards <= kNumParts,
            "logprob_merge: 1, 2, 4 or 8 shards");
  RLK_CHECK(p.num_rows >= 0, "logprob_merge: sizes are not negative");
  RLK_CHECK(p.num_rows == 0 || p.stats != nullptr, "logprob_merge: stats are given");
  RLK_CHECK(p.label_smoothing == 0.0f || p.num_rows == 0 || (p.logprob && p.lse && !p.entropy && !p.sum_p_sq),
            "logprob_merge: label_smoothing is of logprob and lse alone");
}

inline void check_logprob_backward(const LogprobBackwardParams& p) {
  check_logprob_input(p);
  if (p.num_rows == 0 || p.num_columns == 0) return;
  RLK_CHECK(p.lse && p.dlogits, "logprob_backward: lse and dlogits are given");
  RLK_CHECK(!p.dentropy || p.entropy, "logprob_backward: dentropy needs entropy");
  RLK_CHECK(!p.dentropy || p.label_smoothing == 0.0f, "logprob_backward: label_smoothing takes no dentropy");
  RLK_CHECK(p.dlogits_rows.inner > 0 && p.dlogprob_rows.inner > 0 && p.dlse_rows.inner > 0 && p.dentropy_rows.inner > 0,
            "logprob_backward: row layouts have inner >= 1");
}

}  // namespace rlk
