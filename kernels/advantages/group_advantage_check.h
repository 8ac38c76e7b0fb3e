// Every backend checks these preconditions of a group_advantage call, because a violation would corrupt memory. Users'
// input is checked earlier, by the bindings.
#pragma once

#include "rlk/ops/group_advantage.h"

namespace rlk {

RLK_HD bool reads_batch(const GroupAdvantageParams& p) {
  return p.scale == GroupScale::kBatch || p.by_nonzero || p.baseline_kind == GroupBaseline::kBatchMean;
}

inline void check_group_advantage(const GroupAdvantageParams& p) {
  RLK_CHECK(p.num_sequences >= 0 && p.num_sequences < std::int64_t{1} << 30,
            "group_advantage: fewer than 2^30 sequences");
  RLK_CHECK(p.num_groups >= 0 && p.num_groups < std::int64_t{1} << 31, "group_advantage: fewer than 2^31 groups");
  if (p.num_sequences == 0) return;
  RLK_CHECK(p.rewards != nullptr && p.advantage != nullptr, "group_advantage: rewards and advantage are given");
  RLK_CHECK(p.group_offsets == nullptr || p.group_ids == nullptr, "group_advantage: offsets or ids");
  if (p.group_offsets == nullptr && p.group_ids == nullptr) {
    RLK_CHECK(p.group_size > 0 && p.num_sequences % p.group_size == 0, "group_advantage: group_size divides the batch");
  }
  RLK_CHECK(p.index_dtype == DType::kInt32 || p.index_dtype == DType::kInt64, "group_advantage: int32 or int64 groups");
  RLK_CHECK(p.length_dtype == DType::kInt32 || p.length_dtype == DType::kInt64 || p.length_dtype == DType::kFloat32,
            "group_advantage: lengths are int32, int64 or float32");
  RLK_CHECK((p.baseline_kind == GroupBaseline::kLengthMean) <= (p.lengths != nullptr), "group_advantage: no lengths");
  RLK_CHECK(p.baseline_kind != GroupBaseline::kBatchMean || (!p.leave_one_out && !p.best_only),
            "group_advantage: the batch's mean leaves none out and has no best");
  RLK_CHECK((p.baseline_kind == GroupBaseline::kGiven) <= (p.baseline != nullptr), "group_advantage: no baseline");
}

}  // namespace rlk
