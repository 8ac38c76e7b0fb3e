// Calls of optimal_token_baseline over random batches, for its tests on every backend.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "rlk/ops/optimal_token_baseline.h"
#include "rollout_cases.h"

namespace baseline_test {

// Groups are given by a size or by offsets; some are empty or have one sequence. Rewards are per token or per sequence.
struct Batch : rollout_test::Batch {
  rlk::OptimalTokenBaselineParams params;
  std::vector<std::int64_t> groups;
  std::vector<std::int32_t> groups32;

  Batch(unsigned seed, std::int64_t count, std::int64_t longest, bool packed)
      : rollout_test::Batch(seed, count, longest, packed) {
    std::mt19937 random(seed);
    groups.push_back(0);
    for (float& x : arrays[5]) x = std::isfinite(x) ? std::fmin(std::fabs(x) / 4, 1.0f) : x;  // sums of p * p
    params.sequences = sequences;
    params.logprob = train;
    params.rewards = p.advantage;
    params.sum_p_sq = {arrays[5].data(), train.sequence_stride, 1};
    if (seed % 3 == 0) params.importance = {arrays[3].data(), train.sequence_stride, 1};
    params.mask = token_mask;
    params.zero_tail = seed % 4 != 0;
    if (seed % 2 == 0 && count > 0) {
      std::int64_t size = 1 + random() % 8;
      while (count % size != 0) --size;
      params.group_size = size;
      params.num_groups = count / size;
      while (groups.back() < count) groups.push_back(groups.back() + size);
    } else {
      while (groups.back() < count) groups.push_back(std::min<std::int64_t>(count, groups.back() + random() % 6));
      groups32.assign(groups.begin(), groups.end());
      params.num_groups = static_cast<std::int64_t>(groups.size()) - 1;
      params.group_dtype = seed % 5 < 2 ? rlk::DType::kInt32 : rlk::DType::kInt64;
      params.group_offsets = seed % 5 < 2 ? static_cast<const void*>(groups32.data()) : groups.data();
    }
    text += " baseline";
  }
};

}  // namespace baseline_test
