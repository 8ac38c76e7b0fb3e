// Tests kl byte for byte against a second implementation, written from the contract, and against the KL term of
// policy_loss. The backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/losses/kl_terms.h"
#include "kl_cases.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/math/exp.h"
#include "rlk/math/expm1.h"
#include "rlk/ops/kl.h"
#include "rlk/ops/policy_loss.h"
#include "token_lanes.h"
#include "token_reference.h"

namespace kl_test {
namespace {

using linear_test::for_each_backend;
using policy_test::cut_at;
using policy_test::kLargest;
using policy_test::same_bytes;
using policy_test::times;
using policy_test::written;

constexpr float kCanary = -12345.0f;
#if RLK_TEST_HIP
constexpr int kCases = 12;  // few cases, since lanes are slow fibers
#else
constexpr int kCases = 60;
#endif

struct Results {
  std::vector<float> kl, d_logprob, d_importance_weight;
};

Results run(rlk::KlParams p) {
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  constexpr std::size_t kGuard = 16;
  const bool of_weight = p.spec.weight == rlk::KlWeight::kImportance;
  Results r;
  for (auto* array : {&r.kl, &r.d_logprob, &r.d_importance_weight}) array->assign(slots + kGuard, kCanary);
  p.kl = r.kl.data();
  p.d_logprob = r.d_logprob.data();
  if (of_weight) p.d_importance_weight = r.d_importance_weight.data();
#if RLK_TEST_HIP
  rlk::hip::kl(p, 0, 0);
#else
  rlk::cpu::kl(p);
#endif
  for (auto* array : {&r.kl, &r.d_logprob, &r.d_importance_weight}) {
    for (std::size_t i = slots; i < slots + kGuard; ++i) EXPECT_EQ((*array)[i], kCanary) << "guard";
    array->resize(slots);
  }
  if (!of_weight) r.d_importance_weight.assign(slots, 0.0f);
  return r;
}

// A second implementation of the contract, one token at a time.
Results reference(const rlk::KlParams& p) {
  const rlk::KlSpec& s = p.spec;
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  Results r = {std::vector<float>(slots), std::vector<float>(slots), std::vector<float>(slots)};
  for (std::int64_t i = 0; i < p.sequences.num_slots(); ++i) {
    const std::int64_t row = i / p.sequences.num_tokens, column = i % p.sequences.num_tokens;
    const auto at = [&](const rlk::PolicyTokens& a) { return a.data[row * a.sequence_stride + column]; };
    if (!policy_test::is_set(p.mask, row * p.mask.row_stride + column)) continue;
    const float l = at(p.logprob), f = at(p.ref_logprob), raw = f - l;
    const float e = policy_test::limited(raw, -s.input_limit, s.input_limit);
    float value = 0.0f, slope = 0.0f;
    switch (s.estimator) {
      case rlk::KlEstimator::kNone:
        break;
      case rlk::KlEstimator::kK1:
        value = -e;
        slope = 1.0f;
        break;
      case rlk::KlEstimator::kK2:
        value = e / 2 * e;
        slope = -e;
        break;
      case rlk::KlEstimator::kK3:
        value = rlk::expm1(e) - cut_at(e, kLargest);
        slope = -rlk::expm1(e);
        break;
      case rlk::KlEstimator::kAbs:
        value = std::fabs(e);
        slope = e > 0 ? -1.0f : e < 0 ? 1.0f : e == 0 ? 0.0f : e;
    }
    const bool held = policy_test::outside(raw, -s.input_limit, s.input_limit);
    if (held) slope = 0.0f;
    if (s.straight_through) slope = l - f;
    float along = value;
    if (s.weight == rlk::KlWeight::kOldLogprob) {
      const float o = at(p.weight), r = rlk::exp(l - o);
      if (s.estimator == rlk::KlEstimator::kK3) value = rlk::expm1(cut_at(e, 80.0f)) - cut_at(e, 80.0f);
      slope = times(cut_at(value, kLargest) + slope, r);
      value = times(value, r);
      if (s.estimator == rlk::KlEstimator::kK3 && !s.straight_through) {
        if (e > 16) {
          const float x = l - o, sum = x == -INFINITY ? x : x + e;
          value = rlk::exp(held ? sum : f - o) - cut_at(times(r, 1 + e), kLargest);
        }
        slope = held ? value : -times(e, r);
      }
    } else if (s.weight == rlk::KlWeight::kImportance) {
      slope = times(slope, at(p.weight));
      value = times(value, at(p.weight));
    }
    if (policy_test::outside(value, -s.limit, s.limit) && !s.straight_through) slope = along = 0.0f;
    const auto k = static_cast<std::size_t>(i);
    r.kl[k] = written(policy_test::limited(value, -s.limit, s.limit));
    r.d_logprob[k] = written(times(at(p.d_kl), slope));
    if (s.weight == rlk::KlWeight::kImportance) r.d_importance_weight[k] = written(times(at(p.d_kl), along));
  }
  return r;
}

// Shapes: no row and no token; one token; short odd rows; a tile of each kind and one more token; several tiles.
constexpr std::int64_t kShapes[][2] = {{0, 7},   {3, 0},    {1, 1},    {5, 13},   {70, 3},
                                       {9, 257}, {2, 1025}, {1, 9000}, {130, 40}, {3, 2500}};

TEST(Kl, HasTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    for (const auto& shape : kShapes) {
      for (int i = 0; i < (shape[0] * shape[1] > 2000 ? kCases / 10 : kCases); ++i) {
        Case c;
        make_case(seed++, shape[0], shape[1], &c);
        const Results got = run(c.p), want = reference(c.p);
        EXPECT_TRUE(same_bytes(got.kl, want.kl)) << backend << ", " << c.text << " kl";
        EXPECT_TRUE(same_bytes(got.d_logprob, want.d_logprob)) << backend << ", " << c.text << " d_logprob";
        EXPECT_TRUE(same_bytes(got.d_importance_weight, want.d_importance_weight))
            << backend << ", " << c.text << " d_importance_weight";
        if (::testing::Test::HasFailure()) return;
      }
    }
  });
}

TEST(Kl, AMaskThatIsNotThereMasksNothing) {
  Case c;
  make_case(7, 5, 300, &c);
  std::vector<unsigned char> ones(static_cast<std::size_t>(5 * 300), 1);
  for (auto& array : c.arrays) {
    for (float& x : array) x = std::isfinite(x) && std::fabs(x) < 100 ? x : 0.5f;
  }
  c.p.mask = {};
  const Results without = run(c.p);
  c.p.mask = rlk::mask_of(ones.data(), 300, rlk::DType::kBool);
  EXPECT_TRUE(same_bytes(without.kl, run(c.p).kl));
}

TEST(Kl, FourTokensOfALaneHaveTheirOwnBits) {
  for (unsigned seed = 1; seed < 1000; ++seed) {
    Case c;
    make_case(seed, 1, 4, &c);
    const bool counts[4] = {true, seed % 2 != 0, seed % 3 != 0, true};
    std::vector<const float*> arrays;
    for (const auto& array : c.arrays) arrays.push_back(array.data());
    policy_test::expect_four_alike<rlk::KlTokenTerms>(c.p, {}, arrays, counts, c.text);
  }
}

#if !RLK_TEST_HIP
// Sequences have one token, so that a sum over a sequence is the token's own.
TEST(Kl, IsTheKlTermOfPolicyLoss) {
  for (unsigned seed = 1; seed < 400; ++seed) {
    Case c;
    make_case(seed, 1, 64, &c);
    if (c.p.spec.weight == rlk::KlWeight::kImportance) continue;
    c.p.mask = {};
    for (auto& array : c.arrays) {
      for (float& x : array) x = std::isfinite(x) && std::fabs(x) < 100 ? x : -0.5f;
    }
    const std::vector<float> one(1, 1.0f), nothing(1, 0.0f);
    const unsigned char mask = 1;
    const Results got = run(c.p);
    for (std::size_t i = 0; i < 64; ++i) {
      rlk::PolicyLossParams p;
      p.sequences = {nullptr, rlk::DType::kInt32, 1, 1};
      p.mask = rlk::mask_of(&mask, 1, rlk::DType::kBool);
      p.logprob = {&c.arrays[0][i], 1, 1};
      p.ref_logprob = {&c.arrays[1][i], 1, 1};
      if (c.p.spec.weight == rlk::KlWeight::kOldLogprob) p.old_logprob = {&c.arrays[2][i], 1, 1};
      p.advantage = {nothing.data(), 1, 1};
      rlk::PolicySpec& s = p.spec;
      s.log_ratio_min = s.clip_low = -INFINITY;
      s.log_ratio_max = s.clip_high = s.ratio_cap = s.dual_clip = s.drop_above = INFINITY;
      s.kl = c.p.spec.estimator;
      s.kl_straight_through = c.p.spec.straight_through;
      s.kl_times_ratio = c.p.spec.weight == rlk::KlWeight::kOldLogprob;
      s.kl_coef = 1.0f;
      s.kl_input_limit = c.p.spec.input_limit;
      s.kl_limit = c.p.spec.limit;
      float loss = 0.0f, slope = 0.0f;
      std::vector<float> metrics(rlk::kPolicyMetrics);
      p.denominator_value = 1.0f;
      p.loss = &loss;
      p.metrics = metrics.data();
      p.d_logprob = &slope;
      rlk::cpu::policy_loss_alone(p);
      EXPECT_EQ(std::memcmp(&got.kl[i], &metrics[rlk::kPolicyMetricKlSum], 4), 0) << c.text << " token " << i;
      const float of_token = times(c.arrays[3][i], slope);
      if (std::isnan(of_token) && std::isnan(got.d_logprob[i])) continue;
      EXPECT_EQ(got.d_logprob[i], of_token) << c.text << " token " << i;
    }
  }
}
#endif

}  // namespace
}  // namespace kl_test
