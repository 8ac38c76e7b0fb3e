// Calls of covariance_mask over random batches, for its tests on every backend.
#pragma once

#include "rlk/ops/covariance_mask.h"
#include "rollout_cases.h"

namespace covariance_test {

// Every third batch is kKl or kEntropy. Ratios choose no token, some, or all; seeds have more than 32 bits. Some
// batches have equal covariances: advantages with few values and log-probabilities with a single value.
struct Batch : rollout_test::Batch {
  rlk::CovarianceMaskParams params;

  Batch(unsigned seed, std::int64_t count, std::int64_t longest, bool packed)
      : rollout_test::Batch(seed, count, longest, packed) {
    if (seed % 4 == 1) {
      for (float& l : arrays[0]) l = std::isfinite(l) ? -0.5f : l;
    }
    if (seed % 2 == 1 && p.advantage.token_stride == 1) {
      for (float& a : arrays[2]) a = std::isfinite(a) ? std::round(a) : a;
    }
    constexpr double kShares[] = {1e-9, 0.01, 0.2, 1.0};
    params.sequences = sequences;
    params.logprob = train;
    params.advantage = p.advantage;
    params.mask = token_mask;
    const auto largest = seed % 6 == 0 ? rlk::CovarianceKind::kEntropy : rlk::CovarianceKind::kKl;
    params.kind = seed % 3 == 0 ? largest : rlk::CovarianceKind::kClip;
    if (params.kind == rlk::CovarianceKind::kEntropy) {
      params.advantage = {};
      for (float& h : arrays[0]) h = std::isfinite(h) ? std::round(8.0f * h) / 8.0f : h;  // so that some are equal
    }
    if (params.kind == rlk::CovarianceKind::kClip) params.old_logprob = {arrays[1].data(), train.sequence_stride, 1};
    params.lower = seed % 5 == 0 ? -1.0f : 0.1f;
    params.upper = seed % 5 == 1 ? 0.6f : policy_test::kInf;
    params.clip_low = 0.9f;
    params.clip_high = 1.1f;
    params.ratio = kShares[seed / 3 % 4];
    params.seed = 0x9e3779b97f4a7c15u * seed;
    text += " covariance";
  }
};

}  // namespace covariance_test
