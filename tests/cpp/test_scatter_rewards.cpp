// Tests scatter_rewards byte for byte against a second implementation, written from the contract. The backend is the
// CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/advantages/reward_terms.h"
#include "linear_backend.h"
#include "reward_cases.h"
#include "rlk/backends.h"
#include "rlk/math/expm1.h"
#include "rlk/ops/kl.h"
#include "rlk/ops/scatter_rewards.h"

namespace reward_test {
namespace {

using linear_test::for_each_backend;
using policy_test::kShapes;
using policy_test::limited;
using policy_test::same_bytes;
using policy_test::written;
using rlk::RewardSpec;

#if RLK_TEST_HIP
constexpr int kShortCases = 2, kLongCases = 1;  // few cases, since lanes are slow fibers
constexpr unsigned kPaddedCases = 4;
#else
constexpr int kShortCases = 60, kLongCases = 10;
constexpr unsigned kPaddedCases = 60;
#endif
constexpr int kSpreadCases = 1;

struct Results {
  std::vector<float> rewards, costs, combined;
  std::vector<std::int64_t> lengths;
};

// The first output begins `shift` elements past a multiple of 16 bytes, and each next output `more` elements further.
Results run(rlk::ScatterRewardsParams p, std::size_t shift = 0, std::size_t more = 0) {
  constexpr float kCanary = -12345.0f;
  constexpr std::size_t kGuard = 16;
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  Results r;
  for (auto* array : {&r.rewards, &r.costs, &r.combined}) array->assign(kGuard + slots + kGuard, kCanary);
  r.lengths.assign(static_cast<std::size_t>(p.sequences.num_sequences) + kGuard, -7);
  const std::size_t at[3] = {shift, shift + more, shift + 2 * more};
  p.to_tokens = r.rewards.data() + at[0];
  p.costs = r.costs.data() + at[1];
  p.combined = r.combined.data() + at[2];
  p.lengths = r.lengths.data();
#if RLK_TEST_HIP
  policy_test::Workspace workspace(rlk::hip::scatter_rewards_workspace_bytes(p, 0));
  p.workspace = workspace.data();
  rlk::hip::scatter_rewards(p, 0, 0);
#else
  rlk::cpu::scatter_rewards(p);
#endif
  std::vector<float>* const arrays[3] = {&r.rewards, &r.costs, &r.combined};
  for (std::size_t k = 0; k < 3; ++k) {
    std::vector<float>& array = *arrays[k];
    for (std::size_t i = 0; i < array.size(); ++i) {
      const bool is_slot = i >= at[k] && i < at[k] + slots;
      EXPECT_TRUE(is_slot || array[i] == kCanary) << "guard";
    }
    array = {array.begin() + static_cast<std::ptrdiff_t>(at[k]),
             array.begin() + static_cast<std::ptrdiff_t>(at[k] + slots)};
  }
  for (std::size_t i = r.lengths.size() - kGuard; i < r.lengths.size(); ++i) EXPECT_EQ(r.lengths[i], -7) << "guard";
  r.lengths.resize(r.lengths.size() - kGuard);
  return r;
}

float kl_of(const RewardSpec& s, float l, float f) {
  const float e = limited(f - l, -s.kl_input_limit, s.kl_input_limit);
  float k = -e;
  if (s.kl == rlk::KlEstimator::kK2) k = e / 2 * e;
  if (s.kl == rlk::KlEstimator::kK3) k = rlk::expm1(e) - policy_test::cut_at(e, policy_test::kLargest);
  if (s.kl == rlk::KlEstimator::kAbs) k = std::fabs(e);
  return limited(k, -s.kl_limit, s.kl_limit);
}

// A second implementation of the contract, one sequence at a time.
Results reference(const Case& c) {
  const rlk::ScatterRewardsParams& p = c.call;
  const RewardSpec& s = p.spec;
  const auto slots = static_cast<std::size_t>(c.sequences.num_slots());
  Results r = {std::vector<float>(slots), std::vector<float>(slots), std::vector<float>(slots), {}};
  float lagrange = p.lagrange != nullptr ? c.lagrange : p.lagrange_value;
  if (p.lagrange != nullptr && !(lagrange >= 0.0f && lagrange < INFINITY)) lagrange = NAN;
  for (std::int64_t q = 0; q < c.sequences.num_sequences; ++q) {
    std::vector<std::int64_t> tokens;
    for (std::int64_t t = 0; t < c.length(q); ++t) {
      if (!c.counts(q, t)) continue;
      tokens.push_back(t);
      const auto from = static_cast<std::size_t>(c.begin(q) + t);
      float x = p.token_rewards.data == nullptr ? 0.0f : p.token_rewards.data[from];
      if (s.kl != rlk::KlEstimator::kNone) x = x - s.kl_coef * kl_of(s, c.train_of(q, t), c.rollout_of(q, t));
      r.rewards[c.slot(q, t)] = x;
    }
    r.lengths.push_back(static_cast<std::int64_t>(tokens.size()));
    if (tokens.empty()) continue;
    if (p.span_offsets.data != nullptr) {
      const auto first = static_cast<std::size_t>(c.span_offsets64[static_cast<std::size_t>(q)]);
      const auto after = static_cast<std::size_t>(c.span_offsets64[static_cast<std::size_t>(q) + 1]);
      for (std::size_t i = first; i < after; ++i) {
        const auto low = std::lower_bound(tokens.begin(), tokens.end(), c.spans64[2 * i]);
        std::vector<std::int64_t> of(low, std::lower_bound(low, tokens.end(), c.spans64[2 * i + 1]));
        if (of.empty()) continue;
        float share = c.span_rewards[i];
        if (s.place == rlk::SpanPlace::kSpread) share = share / static_cast<float>(of.size());
        if (s.place == rlk::SpanPlace::kLast) of = {of.back()};
        if (s.place == rlk::SpanPlace::kFirst) of = {of.front()};
        for (const std::int64_t t : of) r.rewards[c.slot(q, t)] += share;
      }
    }
    const auto n = static_cast<std::int64_t>(tokens.size());
    float reward = p.rewards.data == nullptr ? 0.0f : p.rewards.data[q * p.rewards.sequence_stride];
    reward = reward - s.length_penalty * static_cast<float>(n);
    if (s.overlong_penalty > 0.0f && n > s.overlong_begin) {
      reward = reward +
               static_cast<float>(s.overlong_begin - n) / static_cast<float>(s.overlong_buffer) * s.overlong_penalty;
    }
    r.rewards[c.slot(q, tokens.back())] += reward;
    if (p.cost.data != nullptr) {
      r.costs[c.slot(q, tokens.back())] = written(p.cost.data[q * p.cost.sequence_stride]);
    }
    for (const std::int64_t t : tokens) {
      const std::size_t at = c.slot(q, t);
      r.rewards[at] = written(r.rewards[at]);
      const float both = r.rewards[at] - policy_test::times(lagrange, r.costs[at]);
      r.combined[at] = written(s.normalize_lagrange ? both / (1.0f + lagrange) : both);
    }
  }
  return r;
}

void expect_same(const Results& got, const Results& want, const std::string& text) {
  EXPECT_TRUE(same_bytes(got.rewards, want.rewards)) << "rewards, " << text;
  EXPECT_TRUE(same_bytes(got.costs, want.costs)) << "costs, " << text;
  EXPECT_TRUE(same_bytes(got.combined, want.combined)) << "combined, " << text;
  EXPECT_EQ(got.lengths, want.lengths) << text;
}

TEST(ScatterRewards, HaveTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    for (const auto& shape : kShapes) {
      for (const bool packed : {false, true}) {
        for (int i = 0; i < (shape[0] * shape[1] > 2000 ? kLongCases : kShortCases); ++i, ++seed) {
          const Case c(seed, shape[0], shape[1], packed);
          expect_same(run(c.call), reference(c), backend + ", " + c.text);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  });
}

// Sequences are also longer than one stretch of a block.
TEST(ScatterRewards, SpreadOverSpansOfEveryKindHaveTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    const auto check = [&](std::int64_t count, std::int64_t longest, int cases) {
      for (int i = 0; i < 2 * cases && !::testing::Test::HasFailure(); ++i, ++seed) {
        const SpreadCase c(seed, count, longest, i % 2 != 0);
        const std::string text = backend + ", " + c.text;
        expect_same(run(c.call, seed % 4, seed / 4 % 2), reference(c), text);
#if RLK_TEST_HIP
        const SpreadCase bad(seed, count, longest, i % 2 != 0, true);
        expect_same(run(bad.call, seed % 4, seed / 4 % 2), reference(c), text + ", bad spans");
#endif
      }
    };
    for (const auto& shape : kShapes) check(shape[0], shape[1], kSpreadCases);
    check(2, 1301, 6);
    check(2, 40001, 1);
  });
}

// The last token that counts lies in the second to last stretch, and a span crosses into the last stretch.
TEST(ScatterRewards, SpreadRewardsOfALongSequenceWhoseLastTokensAreMasked) {
  constexpr std::int64_t kTokens = 40001, kCounted = 30001;
  std::vector<unsigned char> mask(kTokens);
  std::fill(mask.begin(), mask.begin() + kCounted, 1);
  const std::vector<std::int64_t> spans = {30000, 35000, 35000, 40000}, offsets = {0, 2};
  const std::vector<float> of_spans = {3.0f, 5.0f}, ones = {1.0f};
  rlk::ScatterRewardsParams p;
  p.sequences = {nullptr, rlk::DType::kInt32, 1, kTokens};
  p.mask = rlk::mask_of(mask.data(), kTokens, rlk::DType::kBool);
  p.rewards = p.cost = {ones.data(), 1, 0};
  p.spans = {spans.data(), rlk::DType::kInt64};
  p.span_offsets = {offsets.data(), rlk::DType::kInt64};
  p.span_rewards = of_spans.data();
  p.num_spans = 2;
  p.spec.place = rlk::SpanPlace::kSpread;
  const Results got = run(p);
  for (std::size_t t = 0; t < kTokens; ++t) {
    ASSERT_EQ(got.rewards[t], t == 30000 ? 4.0f : 0.0f) << t;
    ASSERT_EQ(got.costs[t], t == 30000 ? 1.0f : 0.0f) << t;
  }
  EXPECT_EQ(got.lengths, (std::vector<std::int64_t>{kCounted}));
}

// A packed batch becomes padded rows. The room after them holds arbitrary values and is masked.
TEST(ScatterRewards, PaddingChangesNoBit) {
  for (unsigned seed = 1; seed < kPaddedCases; ++seed) {
    const Case c(seed, 6, 700, true);
    const std::int64_t width = 1100, count = c.sequences.num_sequences;
    std::vector<float> arrays[3];
    for (auto& array : arrays) array.assign(static_cast<std::size_t>(count * width), NAN);
    std::vector<unsigned char> mask(static_cast<std::size_t>(count * width));
    const float* const from[3] = {c.arrays[2].data(), c.train.data, c.rollout.data};
    for (std::int64_t q = 0; q < count; ++q) {
      for (std::int64_t t = 0; t < c.length(q); ++t) {
        const auto to = static_cast<std::size_t>(q * width + t);
        for (int k = 0; k < 3; ++k) arrays[k][to] = from[k][c.begin(q) + t];
        mask[to] = c.counts(q, t);
      }
    }
    rlk::ScatterRewardsParams p = c.call;
    p.sequences = {nullptr, rlk::DType::kInt32, count, width};
    p.mask = rlk::mask_of(mask.data(), width, rlk::DType::kBool);
    if (p.token_rewards.data != nullptr) p.token_rewards = {arrays[0].data(), width, 1};
    p.logprob = {arrays[1].data(), width, 1};
    p.ref_logprob = {arrays[2].data(), width, 1};
    const Results one = run(c.call), other = run(p);
    Results back = one;
    for (std::int64_t q = 0; q < count; ++q) {
      for (std::int64_t t = 0; t < width; ++t) {
        const auto at = static_cast<std::size_t>(q * width + t);
        if (t >= c.length(q)) {
          ASSERT_TRUE(other.rewards[at] == 0.0f && other.costs[at] == 0.0f && other.combined[at] == 0.0f) << c.text;
          continue;
        }
        back.rewards[c.slot(q, t)] = other.rewards[at];
        back.costs[c.slot(q, t)] = other.costs[at];
        back.combined[c.slot(q, t)] = other.combined[at];
      }
    }
    back.lengths = other.lengths;
    expect_same(back, one, c.text);
  }
}

TEST(ScatterRewards, FourTokensOfALaneHaveTheirOwnBits) {
  for (unsigned seed = 1; seed < 1000; ++seed) {
    Case c(seed, 1, 4, false);
    std::vector<float> out(4);
    c.call.combined = out.data();
    const bool counts[4] = {c.counts(0, 0), c.counts(0, 1), c.counts(0, 2), c.counts(0, 3)};
    policy_test::expect_four_alike<rlk::RewardTokenTerms>(
        c.call, {seed % 7 == 0 ? NAN : 0.0f, 0.5f}, {c.arrays[2].data(), c.train.data, c.rollout.data}, counts, c.text);
  }
}

#if RLK_TEST_HIP
// Spans on the device, which the host cannot check before the launch.
TEST(ScatterRewards, WhatIsNoSpanMakesTheRewardOfItsSequenceNaN) {
  const std::vector<unsigned char> mask(3 * 5, 1);
  const std::vector<float> of_spans = {1, 2, 4}, of_sequences = {8, 16, 32};
  for (const auto& wrong : std::vector<std::vector<std::int64_t>>{{-1, 2}, {3, 2}, {2, 6}}) {
    const std::vector<std::int64_t> offsets = {0, 1, 2, 3}, spans = {0, 2, wrong[0], wrong[1], 0, 5};
    rlk::ScatterRewardsParams p;
    p.sequences = {nullptr, rlk::DType::kInt32, 3, 5};
    p.mask = rlk::mask_of(mask.data(), 5, rlk::DType::kBool);
    p.rewards = {of_sequences.data(), 1, 0};
    p.spans = {spans.data(), rlk::DType::kInt64};
    p.span_offsets = {offsets.data(), rlk::DType::kInt64};
    p.span_rewards = of_spans.data();
    p.num_spans = 3;
    const std::vector<float> want = {0, 1, 0, 0, 8, 0, 0, 0, 0, rlk::canonical_nan(), 0, 0, 0, 0, 36};
    EXPECT_TRUE(same_bytes(run(p).rewards, want));
  }
}

TEST(ScatterRewards, CutsThatDoNotAscendMakeTheSequencesBesideThemNaN) {
  const std::vector<std::int64_t> cuts = {0, 40, 100, 90, 160, 200};
  const std::vector<float> ones(5, 1.0f);
  rlk::ScatterRewardsParams p;
  p.sequences = {cuts.data(), rlk::DType::kInt64, 5, 200};
  p.rewards = {ones.data(), 1, 0};
  const Results got = run(p);
  for (std::size_t t = 0; t < 200; ++t) {
    const bool in_doubt = 40 <= t && t < 160;  // every sequence that begins or ends at 100 or 90
    EXPECT_TRUE(std::isnan(got.rewards[t]) == in_doubt) << t;
    if (!in_doubt) EXPECT_EQ(got.rewards[t], t == 39 || t == 199 ? 1.0f : 0.0f) << t;
  }
  EXPECT_EQ(got.lengths, (std::vector<std::int64_t>{40, 0, 0, 0, 40}));
}

// Offsets of sequences and of spans do not ascend, in the pass with one block per sequence. All other sequences keep
// their rewards.
TEST(ScatterRewards, SpreadRewardsOfSequencesThatAreNotGoodAreNaN) {
  const std::vector<float> ones(5, 1.0f), of_spans = {10.0f, 20.0f, 30.0f, 40.0f, 50.0f};
  const std::vector<std::int64_t> spans = {0, 10, 0, 10, 0, 0, 0, 10, 390, 400};
  const std::vector<std::int64_t> good_cuts = {0, 400, 1000, 1200, 1600, 2000}, good_offsets = {0, 1, 2, 3, 4, 5};
  const std::vector<std::int64_t> cuts = {0, 400, 1000, 900, 1600, 2000}, offsets = {0, 1, 4, 3, 4, 5};
  for (const bool of_cuts : {true, false}) {
    rlk::ScatterRewardsParams p;
    p.sequences = {of_cuts ? cuts.data() : good_cuts.data(), rlk::DType::kInt64, 5, 2000};
    p.rewards = {ones.data(), 1, 0};
    p.spans = {spans.data(), rlk::DType::kInt64};
    p.span_offsets = {of_cuts ? good_offsets.data() : offsets.data(), rlk::DType::kInt64};
    p.span_rewards = of_spans.data();
    p.num_spans = 5;
    p.spec.place = rlk::SpanPlace::kSpread;
    p.cost = {ones.data(), 1, 0};
    const Results got = run(p);
    for (std::size_t t = 0; t < 2000; ++t) {
      const bool is_end = t == 399 || t == 1999 || (!of_cuts && (t == 999 || t == 1199 || t == 1599));
      EXPECT_EQ(got.costs[t], is_end ? 1.0f : 0.0f) << of_cuts << ", " << t;
      // Bad offsets of sequences: every sequence that begins or ends at 1000 or 900. Bad span offsets: the last token
      // of sequence 2, whose span offsets descend.
      const bool is_nan = of_cuts ? 400 <= t && t < 1600 : t == 1199;
      float want = t < 10 ? 1.0f : t >= 1990 ? 5.0f : 0.0f;
      if (t == 399 || t == 1999 || (!of_cuts && (t == 999 || t == 1599))) want += 1.0f;
      if (!of_cuts && 400 <= t && t < 410) want = 6.0f;  // spans 1 and 3; span 2 has no token
      if (!of_cuts && 1200 <= t && t < 1210) want = 4.0f;
      EXPECT_TRUE(is_nan ? std::isnan(got.rewards[t]) : got.rewards[t] == want) << of_cuts << ", " << t;
    }
    EXPECT_EQ(got.lengths, of_cuts ? (std::vector<std::int64_t>{400, 0, 0, 0, 400})
                                   : (std::vector<std::int64_t>{400, 600, 200, 400, 400}));
  }
}
#else
TEST(ScatterRewards, TakeTheKlOfKl) {
  for (unsigned seed = 1; seed < 200; ++seed) {
    Case c(seed, 3, 41, false);
    if (c.call.spec.kl == rlk::KlEstimator::kNone) continue;
    rlk::ScatterRewardsParams p = c.call;
    p.token_rewards = p.rewards = {};
    p.token_rewards.token_stride = 1;
    p.span_offsets = {};
    p.num_spans = 0;
    p.spec.kl_coef = -1.0f;  // x = +0 + K
    p.spec.length_penalty = p.spec.overlong_penalty = 0.0f;
    std::vector<float> want(static_cast<std::size_t>(c.sequences.num_slots()));
    rlk::KlParams k;
    k.sequences = c.sequences;
    k.logprob = c.train;
    k.ref_logprob = c.rollout;
    k.mask = c.token_mask;
    k.spec = {p.spec.kl, 0, rlk::KlWeight::kNone, p.spec.kl_input_limit, p.spec.kl_limit};
    k.kl = want.data();
    rlk::cpu::kl(k);
    EXPECT_TRUE(same_bytes(run(p).rewards, want)) << c.text;
  }
}

TEST(ScatterRewards, CutsAndSpansThatAreNoneAreRefusedBeforeAnythingIsWritten) {
  for (const int wrong : {0, 1, 2, 3, 4, 5, 6}) {
    Case c(3, 6, 50, true);
    c.call.spans = {c.spans64.data(), rlk::DType::kInt64};
    c.call.span_offsets = {c.span_offsets64.data(), rlk::DType::kInt64};
    c.call.span_rewards = c.span_rewards.data();
    c.call.num_spans = static_cast<std::int64_t>(c.span_rewards.size());
    ASSERT_GT(c.call.num_spans, 1);
    std::vector<float> out(static_cast<std::size_t>(c.sequences.num_slots()), -5.0f);
    std::vector<std::int64_t> lengths(6, -5);
    c.call.to_tokens = out.data();
    c.call.lengths = lengths.data();
    if (wrong == 0) c.cuts64[0] = c.cuts32[0] = 1;
    if (wrong == 1) c.cuts64[6] = c.cuts32[6] += 1;
    if (wrong == 2) c.spans64[0] = -1;
    if (wrong == 3) c.spans64[0] = c.spans64[1] + 1;
    if (wrong == 4) c.spans64.back() = 51;
    if (wrong == 5) c.span_offsets64[0] = 1;
    if (wrong == 6) c.span_offsets64[6] -= 1;
    EXPECT_THROW(rlk::cpu::scatter_rewards(c.call), rlk::InvalidArgument) << wrong;
    for (const float x : out) ASSERT_EQ(x, -5.0f) << wrong;
    for (const std::int64_t n : lengths) ASSERT_EQ(n, -5) << wrong;
  }
}
#endif

}  // namespace
}  // namespace reward_test
