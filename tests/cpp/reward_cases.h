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
  std::vector<float> rewards, cost, span_rewards;  // arrays with unrelated numbers between the sequences
  std::vector<std::int64_t> spans64, span_offsets64;
  std::vector<std::int32_t> spans32, span_offsets32;
  float lagrange = 0.0f;
  rlk::ScatterRewardsParams call;  // its outputs are not set

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
    const bool turns = pick(2) == 0;  // spans one after another, often more than a wave has lanes
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
        if (pick(4) == 0 && spans64.size() > 1 && spans64.back() <= this->length(s)) {  // this span begins where
                                                                                        // another one ends
          end = spans64.back();
          begin = std::min(begin, end);
        }
        spans64.insert(spans64.end(), {begin, end});
        span_rewards.push_back(value());
      }
      span_offsets64.push_back(static_cast<std::int64_t>(span_rewards.size()));
    }

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
      give_spans(wide, wide_offsets);
    }
    lagrange = wild && pick(2) == 0 ? INFINITY : std::fabs(normal(random));
    call.lagrange_value = 0.75f;
    if (pick(2)) call.lagrange = &lagrange;
    text +=
        " kl " + std::to_string(static_cast<int>(spec.kl)) + " place " + std::to_string(static_cast<int>(spec.place));
  }

  // Sets spans and span offsets from spans64 and span_offsets64, as int64 if wide, else as int32.
  void give_spans(bool wide, bool wide_offsets) {
    spans32.assign(spans64.begin(), spans64.end());
    span_offsets32.assign(span_offsets64.begin(), span_offsets64.end());
    call.spans = {wide ? static_cast<const void*>(spans64.data()) : spans32.data(),
                  wide ? rlk::DType::kInt64 : rlk::DType::kInt32};
    call.span_offsets = {wide_offsets ? static_cast<const void*>(span_offsets64.data()) : span_offsets32.data(),
                         wide_offsets ? rlk::DType::kInt64 : rlk::DType::kInt32};
    call.span_rewards = span_rewards.data();
    call.num_spans = static_cast<std::int64_t>(span_rewards.size());
  }
};

// Calls that spread the rewards of spans of every kind. In most calls tokens have no rewards themselves. With
// bad_spans, some sequences have an invalid span, which only a GPU accepts. The contract then requires the results of
// the same case without bad_spans.
struct SpreadCase : Case {
  SpreadCase(unsigned seed, std::int64_t count, std::int64_t longest, bool packed, bool bad_spans = false)
      : Case(seed, count, longest, packed) {
    std::mt19937 random(seed + 23);
    const auto pick = [&](std::int64_t n) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    std::normal_distribution<float> normal;
    const bool wild = pick(4) == 0;
    rewards.clear();
    span_rewards.clear();
    spans64.clear();
    span_offsets64 = {0};
    for (std::int64_t s = 0; s < count; ++s) {
      rewards.push_back(normal(random));
      std::vector<std::int64_t> spans = spans_of(s, static_cast<Kind>((seed + s) % kKinds), pick);
      if (pick(3) == 0) {
        const std::int64_t at = pick(static_cast<std::int64_t>(spans.size() / 2) + 1);
        const std::int64_t bad[3][2] = {{-1, length(s)}, {1, 0}, {0, length(s) + 1}};
        const std::int64_t* const one = bad[pick(3)];
        if (bad_spans) {
          spans.insert(spans.begin() + 2 * at, one, one + 2);
          const std::int64_t next = 2 * (at + 256);  // belongs to the same thread
          if (next < static_cast<std::int64_t>(spans.size())) spans.insert(spans.begin() + next, one, one + 2);
        } else {
          spans.resize(static_cast<std::size_t>(2 * at));
          rewards.back() = NAN;
        }
      }
      spans64.insert(spans64.end(), spans.begin(), spans.end());
      span_offsets64.push_back(static_cast<std::int64_t>(spans64.size() / 2));
    }
    for (std::size_t i = 0; i < spans64.size() / 2; ++i) {
      constexpr float kWild[] = {NAN, INFINITY, -INFINITY, 3e38f, -0.0f, 1e-45f};
      // Seeded by the span's place, so that it is the same with and without a bad span before it.
      std::mt19937 of_span(seed + static_cast<unsigned>(spans64[2 * i] * 31 + spans64[2 * i + 1]));
      span_rewards.push_back(wild && of_span() % 8 == 0 ? kWild[of_span() % 6] : static_cast<float>(of_span() % 997));
    }
    const bool wide = pick(2) == 0, wide_offsets = pick(2) == 0;
    give_spans(wide, wide_offsets);
    call.rewards = {rewards.data(), 1, 0};
    call.spec.place = rlk::SpanPlace::kSpread;
    if (pick(4) != 0) {
      call.spec.kl = rlk::KlEstimator::kNone;
      call.token_rewards = {};
    }
    text += " spread";
  }

 private:
  enum Kind {
    kNone,
    kWhole,
    kTouching,
    kApart,
    kEmpty,
    kOfOne,
    kUncounted,
    kDescending,
    kOverlapping,
    kMany,
    kManyOver,
    kKinds
  };

  // Begins and ends of spans. kMany, kManyOver: more spans than a wave has lanes, more than a block holds at a time.
  template <class Pick>
  std::vector<std::int64_t> spans_of(std::int64_t s, Kind kind, const Pick& pick) const {
    const std::int64_t tokens = length(s), many = tokens < 200 ? 70 : 600;
    std::vector<std::int64_t> spans;
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      spans.push_back(begin);
      spans.push_back(end);
    };
    const auto add_turns = [&](std::int64_t turns, std::int64_t between, std::int64_t least, std::int64_t most) {
      std::int64_t at = 0;
      for (std::int64_t i = 0; i < turns; ++i) {
        const std::int64_t begin = std::min(at + pick(between + 1), tokens);
        at = std::min(begin + least + pick(most - least + 1), tokens);
        add(begin, at);
      }
    };
    if (kind == kWhole) add(0, tokens);
    if (kind == kTouching) add_turns(8, 0, 1, tokens / 4 + 1);
    if (kind == kApart || kind == kDescending) add_turns(8, 5, 1, tokens / 6 + 1);
    if (kind == kEmpty) add_turns(20, 3, 0, 2);
    if (kind == kOfOne) add_turns(40, 2, 1, 1);
    if (kind == kMany) add_turns(many, 1, 0, tokens / 300 + 2);
    for (std::int64_t t = 0; kind == kUncounted && t < tokens && spans.size() < 20; ++t) {
      if (!counts(s, t)) add(t, t + 1);
    }
    for (std::int64_t i = kind == kOverlapping ? 2 + pick(6) : kind == kManyOver ? many : 0; i > 0; --i) {
      const std::int64_t begin = pick(tokens + 1), end = kind == kManyOver ? begin + pick(9) : pick(tokens + 1);
      add(std::min(begin, end), std::min(std::max(begin, end), tokens));
    }
    if (kind == kDescending) {
      for (std::size_t i = 0, j = spans.size() - 2; i < j; i += 2, j -= 2) {
        std::swap(spans[i], spans[j]);
        std::swap(spans[i + 1], spans[j + 1]);
      }
    }
    return spans;
  }
};

}  // namespace reward_test
