// Tests policy_loss byte for byte against a second implementation, written from the contract. The backend is the CPU
// or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/losses/policy_plain.h"
#include "linear_backend.h"
#include "policy_loss_cases.h"
#include "policy_loss_reference.h"
#include "rlk/backends.h"
#include "rlk/ops/policy_loss.h"
#include "token_lanes.h"

namespace policy_test {
namespace {

using linear_test::for_each_backend;

constexpr float kCanary = -12345.0f;
#if RLK_TEST_HIP
constexpr int kShortCases = 6, kLongCases = 1;  // few cases, since lanes are slow fibers
constexpr unsigned kPaddedCases = 8;
#else
constexpr int kShortCases = 30, kLongCases = 4;
constexpr unsigned kPaddedCases = 40;
#endif

Results run(rlk::PolicyLossParams p) {
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  constexpr std::size_t kGuard = 16;
  Results r;
  std::vector<float> loss(1 + kGuard, kCanary), metrics(rlk::kPolicyMetrics + kGuard, kCanary);
  r.d_logprob.assign(slots + kGuard, kCanary);
  r.d_entropy.assign(slots + kGuard, kCanary);
  p.loss = loss.data();
  p.metrics = metrics.data();
  p.d_logprob = r.d_logprob.data();
  p.d_entropy = p.entropy.data == nullptr ? nullptr : r.d_entropy.data();
#if RLK_TEST_HIP
  policy_test::Workspace workspace(rlk::hip::policy_loss_alone_workspace_bytes(p, 0));
  p.workspace = workspace.data();
  rlk::hip::policy_loss_alone(p, 0, 0);
#else
  rlk::cpu::policy_loss_alone(p);
#endif
  for (auto* array : {&loss, &metrics, &r.d_logprob, p.d_entropy ? &r.d_entropy : &r.d_logprob}) {
    for (std::size_t i = array->size() - kGuard; i < array->size(); ++i) EXPECT_EQ((*array)[i], kCanary) << "guard";
  }
  r.loss = loss[0];
  r.metrics.assign(metrics.begin(), metrics.begin() + rlk::kPolicyMetrics);
  r.d_logprob.resize(slots);
  r.d_entropy.resize(slots);
  return r;
}

void expect_reference(const Case& c) {
  const Results want = Reference(c.p).run(), got = run(c.p);
  EXPECT_TRUE(same_bytes({got.loss}, {want.loss})) << c.text << " loss";
  EXPECT_TRUE(same_bytes(got.metrics, want.metrics)) << c.text << " metrics";
  EXPECT_TRUE(same_bytes(got.d_logprob, want.d_logprob)) << c.text << " d_logprob";
  if (c.p.entropy.data != nullptr) {
    EXPECT_TRUE(same_bytes(got.d_entropy, want.d_entropy)) << c.text << " d_entropy";
  }
}

TEST(PolicyLoss, HasTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    for (const auto& shape : kShapes) {
      for (const bool packed : {false, true}) {
        const bool is_long = shape[0] * shape[1] > 2000;
        for (int i = 0; i < (is_long ? kLongCases : kShortCases); ++i) {
          Case c;
          make_case(seed++, shape[0], shape[1], packed, &c);
          c.text = backend + ", " + c.text;
          expect_reference(c);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  });
}

TEST(PolicyLoss, PaddingChangesNoBit) {
  for (unsigned seed = 1; seed < kPaddedCases; ++seed) {
    Case packed;
    make_case(seed, 6, 700, true, &packed);
    const rlk::Sequences& q = packed.p.sequences;
    if (packed.p.advantage.token_stride == 0 || packed.p.importance.token_stride == 0) continue;
    constexpr std::int64_t kWidth = 1100;
    Case padded;
    padded.p = packed.p;
    padded.p.sequences = {nullptr, rlk::DType::kInt32, q.num_sequences, kWidth};
    const auto bytes = static_cast<std::size_t>(packed.p.mask.bytes);
    padded.mask.assign(static_cast<std::size_t>(q.num_sequences * kWidth) * bytes, 0);
    for (int k = 0; k < 8; ++k) {
      padded.arrays[k].assign(static_cast<std::size_t>(q.num_sequences * kWidth), NAN);
      for (std::int64_t s = 0; s < q.num_sequences; ++s) {
        for (std::int64_t t = 0; t < packed.cuts64[s + 1] - packed.cuts64[s]; ++t) {
          const auto from = static_cast<std::size_t>(packed.cuts64[s] + t),
                     to = static_cast<std::size_t>(s * kWidth + t);
          padded.arrays[k][to] = packed.arrays[k][from];
          std::memcpy(&padded.mask[to * bytes], &packed.mask[from * bytes], bytes);
        }
      }
    }
    padded.p.mask.data = padded.mask.data();
    padded.p.mask.row_stride = kWidth;
    rlk::PolicyTokens* const arrays[] = {&padded.p.logprob,     &padded.p.old_logprob, &padded.p.advantage,
                                         &padded.p.ref_logprob, &padded.p.importance,  &padded.p.entropy,
                                         &padded.p.selected,    &padded.p.token_weight};
    for (int k = 0; k < 8; ++k) {
      if (arrays[k]->data != nullptr) *arrays[k] = {padded.arrays[k].data(), kWidth, 1};
    }
    const Results a = run(packed.p), b = run(padded.p);
    EXPECT_TRUE(same_bytes({b.loss}, {a.loss})) << packed.text;
    EXPECT_TRUE(same_bytes(b.metrics, a.metrics)) << packed.text;
    for (std::int64_t s = 0; s < q.num_sequences; ++s) {
      for (std::int64_t t = 0; t < packed.cuts64[s + 1] - packed.cuts64[s]; ++t) {
        const float x = a.d_logprob[static_cast<std::size_t>(packed.cuts64[s] + t)];
        const float y = b.d_logprob[static_cast<std::size_t>(s * kWidth + t)];
        ASSERT_EQ(std::memcmp(&x, &y, 4), 0) << packed.text << " sequence " << s << " token " << t;
      }
    }
  }
}

TEST(PolicyLoss, GradientsAreScaledAsIfMultiplied) {
  for (const float factor : {1.0f, 2.5f, 0.0f, -1e30f}) {
    std::vector<float> a(1037), b(1037);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = b[i] = static_cast<float>(i) - 500.25f;
    a[3] = NAN;
    rlk::ScaleGradientsParams p;
    p.first = a.data();
    p.second = b.data() + 1;
    p.count = static_cast<std::int64_t>(b.size()) - 1;
    p.factor = &factor;
    const std::vector<float> before = a, other = b;
#if RLK_TEST_HIP
    rlk::hip::scale_gradients(p, 0, 0);
#else
    rlk::cpu::scale_gradients(p);
#endif
    for (std::size_t i = 0; i + 1 < a.size(); ++i) {
      if (i != 3) {
        EXPECT_EQ(a[i], before[i] * factor);
      }
      EXPECT_EQ(b[i + 1], other[i + 1] * factor);
    }
    EXPECT_EQ(a.back(), before.back());
    EXPECT_EQ(b.front(), other.front());
  }
}

// The terms of plain calls have the bits of the general terms, whatever the arrays hold.
TEST(PolicyLoss, PlainTokensHaveTheBitsOfOthers) {
  using Plain = rlk::PlainPolicyTerms;
  using Any = rlk::PolicyTokenTerms<rlk::PolicyForm::kClipped>;
  for (unsigned seed = 1; seed < 5000; ++seed) {
    Case c;
    make_case(seed, 1, 4, false, &c, true);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    rlk::PolicyFactors f;
    f.weight = seed % 7 == 0 ? std::numeric_limits<float>::infinity() : normal(random);
    rlk::Vec4 in[Plain::kInputs], d_logprob;
    rlk::Vec4Mask mask;
    for (int j = 0; j < 4; ++j) mask.v[j] = random() % 4 != 0 ? -1 : 0;
    for (int k = 0; k < Plain::kInputs; ++k) {
      for (int j = 0; j < 4; ++j) in[k].v[j] = c.arrays[static_cast<std::size_t>(k)][static_cast<std::size_t>(j)];
    }
    rlk::PlainSums<rlk::Vec4> sums;
    rlk::Vec4Mask counted[rlk::kTokenCounts] = {mask};
    Plain::token(c.p, f, in, mask, &d_logprob, &sums, [&](int i, const rlk::Vec4Mask& x) { counted[i] = x; });
    for (int j = 0; j < 4; ++j) {
      const bool counts = mask.v[j] != 0;
      float one[Any::kInputs] = {}, of_one[Any::kOutputs];
      for (int k = 0; k < Plain::kInputs; ++k) one[k] = counts ? in[k].v[j] : 0.0f;
      rlk::TokenSums<float, Any::kSums> alone;
      Any::token(c.p, f, one, counts, of_one, &alone);
      std::vector<float> got = {d_logprob.v[j], rlk::canonical(sums.maximum.v[j])};
      std::vector<float> want = {of_one[0], rlk::canonical(alone.maximum[0])};
      for (int i = 0; i < rlk::kLowerSums; ++i) {  // the sign of a zero has no effect on a sum
        got.push_back(rlk::finished_sum(sums.sum[i].v[j]));
        want.push_back(rlk::finished_sum(alone.sum[i]));
      }
      EXPECT_TRUE(same_bytes(got, want)) << c.text << ", token " << j;
      for (int i = 0; i <= Plain::kCounts; ++i) EXPECT_EQ(counted[i].v[j] != 0, alone.count[i]) << c.text << ' ' << i;
    }
  }
}

// A lane of CUDA has four tokens at once; each token has the bits that it has alone.
TEST(PolicyLoss, FourTokensOfALaneHaveTheirOwnBits) {
  using Terms = rlk::PolicyLossTerms;
  for (unsigned seed = 1; seed < 3000; ++seed) {
    Case c;
    make_case(seed, 1, 4, false, &c);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    rlk::PolicyFactors f;
    f.weight = normal(random);
    f.entropy_weight = normal(random);
    f.ratio = std::fabs(normal(random));
    f.slope = f.ratio;
    f.gradient = normal(random);
    f.importance = std::fabs(normal(random));
    f.importance_clipped = seed % 3 == 0;
    f.gated = seed % 7 == 0;
    f.dropped = seed % 5 == 0;
    f.value = normal(random);
    f.gamma_positive = f.gamma_negative = std::fabs(normal(random));
    std::vector<const float*> arrays;
    for (const auto& array : c.arrays) arrays.push_back(array.data());
    bool counts[4];
    for (bool& x : counts) x = random() % 4 != 0;
    expect_four_alike<Terms>(c.p, f, arrays, counts, c.text);
  }
}

#if !RLK_TEST_HIP
TEST(PolicyLoss, CutsThatDoNotAscendAreRefused) {
  for (const int wrong : {0, 1, 2}) {
    Case c;
    make_case(3, 6, 50, true, &c);
    if (wrong == 0) c.cuts64[0] = c.cuts32[0] = 1;
    if (wrong == 1) c.cuts64[2] = c.cuts32[2] = -1;
    if (wrong == 2) c.cuts64[6] = c.cuts32[6] += 1;
    EXPECT_THROW(run(c.p), rlk::InvalidArgument);
  }
}

TEST(PolicyLoss, BoundsTheWrongWayRoundAreRefused) {
  for (const auto& [low, high] : {std::pair{&rlk::PolicySpec::log_ratio_min, &rlk::PolicySpec::log_ratio_max},
                                  {&rlk::PolicySpec::clip_low, &rlk::PolicySpec::clip_high},
                                  {&rlk::PolicySpec::importance_low, &rlk::PolicySpec::importance_high}}) {
    for (const float above : {2.0f, NAN}) {
      Case c;
      make_case(3, 6, 50, true, &c);
      c.p.spec.*low = above;
      c.p.spec.*high = 1.0f;
      EXPECT_THROW(run(c.p), rlk::InvalidArgument);
    }
  }
}
#endif

}  // namespace
}  // namespace policy_test
