// Random calls of scatter_rewards that reach every combination of a spec, for the tests of every backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "rlk/ops/scatter_rewards.h"
#include "rollout_cases.h"

namespace reward_test {

struct Case : rollout_test::Batch {
  std::vector<float> rewards, cost, span_rewards;  // of sequences with something that is not theirs between them
  std::vector<std::int64_t> spans64, span_offsets64;
  std::vector<std::int32_t> spans32, span_offsets32;
  float lagrange = 0.0f;
  rlk::ScatterRewardsParams call;  // without outputs

  Case(unsigned seed, std::int64_t count, std::int64_t longest, bool packed) : Batch(seed, count, longest, packed) {
    std::mt19937 random(seed + 11);
    const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    std::normal_distribution<float> normal;
    const bool wild = pick(4) == 0;
    const auto value = [&] {
      constexpr float kWild[] = {NAN, INFINITY, -INFINITY, 3e38f, -0.0f};
      return wild && pick(8) == 0 ? kWild[pick(5)] : normal(random);
    };
    const int step = 1 + pick(2);
    for (auto* array : {&rewards, &cost}) {
      array->assign(static_cast<std::size_t>(count * step) + 1, NAN);
      for (std::int64_t s = 0; s < count; ++s) (*array)[static_cast<std::size_t>(s * step)] = value();
    }
    span_offsets64.push_back(0);
    const bool turns = pick(2) == 0;  // one behind the other, often more than a wave has lanes
    for (std::int64_t s = 0; s < count; ++s) {
      const auto length = static_cast<unsigned long>(this->length(s));
      std::int64_t at = 0;
      for (int i = turns ? pick(100) : 0; i > 0; --i) {
        const std::int64_t begin = std::min(at + pick(2) * pick(3), this->length(s));
        at = std::min(begin + pick(9), this->length(s));
        for (int far = 0; far < 3 && at > begin && at < this->length(s) && !counts(s, at - 1); ++far) --at;
        spans64.insert(spans64.end(), {begin, at});
        span_rewards.push_back(value());
      }
      if (turns && pick(4) != 0) {
        span_offsets64.push_back(static_cast<std::int64_t>(span_rewards.size()));
        continue;
      }
      for (int i = pick(6); i > 0; --i) {
        auto begin = static_cast<std::int64_t>(random() % (length + 1));
        auto end = static_cast<std::int64_t>(random() % (length + 1));
        if (pick(3) == 0) end = std::min(begin + pick(4), this->length(s));
        if (begin > end) std::swap(begin, end);
        if (pick(4) == 0 && spans64.size() > 1 && spans64.back() <= this->length(s)) {  // where another one ends
          end = spans64.back();
          begin = std::min(begin, end);
        }
        spans64.insert(spans64.end(), {begin, end});
        span_rewards.push_back(value());
      }
      span_offsets64.push_back(static_cast<std::int64_t>(span_rewards.size()));
    }
    spans32.assign(spans64.begin(), spans64.end());
    span_offsets32.assign(span_offsets64.begin(), span_offsets64.end());

    rlk::RewardSpec& spec = call.spec;
    spec.kl = pick(2) ? rlk::KlEstimator::kNone : static_cast<rlk::KlEstimator>(pick(5));
    spec.kl_coef = 0.05f;
    if (pick(2)) spec.kl_input_limit = 0.25f;
    if (pick(2)) spec.kl_limit = 0.03f;
    if (pick(2)) spec.length_penalty = 1e-3f;
    if (pick(2)) {
      spec.overlong_penalty = 1.5f;
      spec.overlong_begin = longest / 2;
      spec.overlong_buffer = longest / 3 + 1;
    }
    spec.place = static_cast<rlk::SpanPlace>(pick(3));
    spec.normalize_lagrange = pick(2);
    call.sequences = sequences;
    call.mask = token_mask;
    if (pick(5) != 0) call.rewards = {rewards.data(), step, 0};
    if (pick(2)) call.token_rewards = {arrays[2].data(), train.sequence_stride, 1};
    call.logprob = train;
    call.ref_logprob = rollout;
    if (pick(2)) call.cost = {cost.data(), step, 0};
    if (pick(3) != 0) {
      const bool wide = pick(2), wide_offsets = pick(2);
      call.spans = {wide ? static_cast<const void*>(spans64.data()) : spans32.data(),
                    wide ? rlk::DType::kInt64 : rlk::DType::kInt32};
      call.span_offsets = {wide_offsets ? static_cast<const void*>(span_offsets64.data()) : span_offsets32.data(),
                           wide_offsets ? rlk::DType::kInt64 : rlk::DType::kInt32};
      call.span_rewards = span_rewards.data();
      call.num_spans = static_cast<std::int64_t>(span_rewards.size());
    }
    lagrange = wild && pick(2) == 0 ? INFINITY : std::fabs(normal(random));
    call.lagrange_value = 0.75f;
    if (pick(2)) call.lagrange = &lagrange;
    text +=
        " kl " + std::to_string(static_cast<int>(spec.kl)) + " place " + std::to_string(static_cast<int>(spec.place));
  }
};

}  // namespace reward_test
