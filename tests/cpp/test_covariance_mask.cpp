// Tests covariance_mask byte for byte against a second implementation, which is written from the contract and sorts.
// The backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "covariance_cases.h"
#include "kernels/losses/covariance_terms.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/covariance_mask.h"

namespace covariance_test {
namespace {

using linear_test::for_each_backend;
using policy_test::kInf;
using policy_test::limited;
using policy_test::over;
using policy_test::same_bytes;
using policy_test::tree;

#if RLK_TEST_HIP
constexpr int kShortCases = 2, kLongCases = 1, kLeastOfEach = 1;  // few cases, since lanes are slow fibers
#else
constexpr int kShortCases = 36, kLongCases = 12, kLeastOfEach = 20;
#endif

std::vector<float> run(rlk::CovarianceMaskParams p) {
  constexpr float kCanary = -12345.0f;
  constexpr std::size_t kGuard = 16;
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  std::vector<float> selected(slots + kGuard, kCanary);
  p.selected = selected.data();
#if RLK_TEST_HIP
  policy_test::Workspace workspace(rlk::hip::covariance_mask_workspace_bytes(p, 0));
  p.workspace = workspace.data();
  rlk::hip::covariance_mask(p, 0, 0);
#else
  rlk::cpu::covariance_mask(p);
#endif
  for (std::size_t i = slots; i < selected.size(); ++i) EXPECT_EQ(selected[i], kCanary) << "guard";
  selected.resize(slots);
  return selected;
}

struct Found {
  std::vector<float> selected;
  std::size_t candidates = 0, chosen = 0;
};

Found reference(const Batch& b) {
  const rlk::CovarianceMaskParams& p = b.params;
  const auto value = [&](const rlk::PolicyTokens& a, std::int64_t s, std::int64_t t) {
    const std::int64_t row = a.token_stride == 0 || !b.sequences.packed() ? s * a.sequence_stride : b.begin(s);
    return a.data[row + t * a.token_stride];
  };
  std::int64_t n = 0;
  std::vector<float> advantages, logprobs;
  for (std::int64_t s = 0; s < b.sequences.num_sequences; ++s) {
    std::vector<float> a, l;
    for (std::int64_t t = 0; t < b.length(s); ++t) {
      const bool counts = b.counts(s, t);
      n += counts;
      a.push_back(counts && p.advantage.data != nullptr ? value(p.advantage, s, t) : 0.0f);
      l.push_back(counts ? value(p.logprob, s, t) : 0.0f);
    }
    advantages.push_back(a.empty() ? 0.0f : tree(a));
    logprobs.push_back(l.empty() ? 0.0f : tree(l));
  }
  const float count = static_cast<float>(n), mean_a = over(tree(advantages), count),
              mean_l = over(tree(logprobs), count);
  // Ascending priorities. For kKl NaNs come first, then descending covariances.
  using Priority = std::tuple<float, std::uint64_t, std::size_t>;
  std::vector<Priority> candidates;
  for (std::int64_t s = 0; s < b.sequences.num_sequences; ++s) {
    for (std::int64_t t = 0; t < b.length(s); ++t) {
      if (!b.counts(s, t)) continue;
      const bool entropy = p.kind == rlk::CovarianceKind::kEntropy;
      const float l = value(p.logprob, s, t), a = entropy ? 0.0f : value(p.advantage, s, t);
      const float c = entropy ? l : (a - mean_a) * (l - mean_l);
      if (p.kind != rlk::CovarianceKind::kClip) {
        candidates.emplace_back(std::isnan(c) ? -kInf : -c, std::isnan(c) ? 0 : 1, b.slot(s, t));
        continue;
      }
      const float r = rlk::exp(l - value(p.old_logprob, s, t));
      if (!(c > p.lower && c < p.upper) || -a * limited(r, p.clip_low, p.clip_high) > -a * r) continue;
      const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
      const auto sequence = static_cast<std::uint64_t>(s);
      const std::uint32_t drawn =
          rlk::philox4x32({low(sequence), low(sequence >> 32), static_cast<std::uint32_t>(t), 0}, low(p.seed),
                          low(p.seed >> 32))
              .x;
      candidates.emplace_back(0.0f, std::min(drawn, 0xfffffffeu), b.slot(s, t));
    }
  }
  std::sort(candidates.begin(), candidates.end());
  Found found;
  found.candidates = candidates.size();
  found.chosen = std::min(candidates.size(), static_cast<std::size_t>(std::max(1.0, std::floor(p.ratio * n))));
  if (p.kind == rlk::CovarianceKind::kEntropy && n > 0) {
    const float below = std::ceil(static_cast<float>(1.0 - p.ratio) * static_cast<float>(n - 1));
    found.chosen = static_cast<std::size_t>(std::max(1.0, static_cast<double>(n) - static_cast<double>(below)));
    const auto equal = [&](std::size_t i) {
      return std::get<0>(candidates[i]) == std::get<0>(candidates[i - 1]) &&
             std::get<1>(candidates[i]) == std::get<1>(candidates[i - 1]);
    };
    while (found.chosen < candidates.size() && equal(found.chosen)) ++found.chosen;
  }
  found.selected.assign(static_cast<std::size_t>(b.sequences.num_slots()), 0.0f);
  for (std::size_t i = 0; i < found.chosen; ++i) found.selected[std::get<2>(candidates[i])] = 1.0f;
  return found;
}

TEST(CovarianceMask, HasTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    int some = 0, all = 0;
    for (const auto& shape : policy_test::kShapes) {
      for (const bool packed : {false, true}) {
        for (int i = 0; i < (shape[0] * shape[1] > 2000 ? kLongCases : kShortCases); ++i, ++seed) {
          const Batch b(seed, shape[0], shape[1], packed);
          const Found want = reference(b);
          some += 1 < want.chosen && want.chosen < want.candidates;
          all += want.candidates > 1 && want.chosen == want.candidates;
          ASSERT_TRUE(same_bytes(run(b.params), want.selected)) << backend << ", " << b.text;
        }
      }
    }
    EXPECT_GE(some, kLeastOfEach) << "a part of the candidates";
    EXPECT_GE(all, kLeastOfEach) << "all of them";
  });
}

// More equal priorities than one digit of a slot can distinguish; the last chosen token is among them.
TEST(CovarianceMask, EqualOnesAreChosenInTheirOrder) {
#if RLK_TEST_HIP
  constexpr std::int64_t kTokens = 3 << 11;  // places that take two digits of a slot
#else
  constexpr std::int64_t kTokens = (1 << 22) + 5;  // places that take three digits
#endif
  const std::vector<float> zeros(static_cast<std::size_t>(kTokens), 0.0f);
  rlk::CovarianceMaskParams p;
  p.sequences = {nullptr, rlk::DType::kInt32, 1, kTokens};
  p.logprob = p.advantage = {zeros.data(), kTokens, 1};
  p.kind = rlk::CovarianceKind::kKl;
  for (const double share : {1e-9, 0.3, 0.999999, 1.0}) {
    p.ratio = share;
    const std::vector<float> got = run(p);
    const auto chosen = static_cast<std::ptrdiff_t>(std::max(1.0, std::floor(share * static_cast<double>(kTokens))));
    EXPECT_TRUE(std::all_of(got.begin(), got.begin() + chosen, [](float x) { return x == 1.0f; })) << share;
    EXPECT_TRUE(std::all_of(got.begin() + chosen, got.end(), [](float x) { return x == 0.0f; })) << share;
  }
}

TEST(CovarianceMask, FourTokensOfALaneHaveTheirOwnBits) {
  for (unsigned seed = 1; seed < 500; ++seed) {
    Batch b(seed, 1, 4, false);
    rlk::CovarianceMaskParams p = b.params;
    if (p.advantage.token_stride == 0) continue;
    const bool of[4] = {b.counts(0, 0), b.counts(0, 1), b.counts(0, 2), b.counts(0, 3)};
    const std::vector<const float*> arrays = {b.arrays[2].data(), b.arrays[0].data(), b.arrays[1].data()};
    policy_test::expect_four_alike<rlk::CovarianceTerms>(p, {0.1f, -0.7f}, arrays, of, b.text);
    policy_test::expect_four_alike<rlk::CovarianceSumTerms>(p, {}, arrays, of, b.text);
  }
}

#if !RLK_TEST_HIP
TEST(CovarianceMask, CutsThatDoNotAscendAreRefused) {
  Batch b(3, 6, 50, true);
  b.cuts64[2] = b.cuts32[2] = -1;
  EXPECT_THROW(run(b.params), rlk::InvalidArgument);
}
#endif

}  // namespace
}  // namespace covariance_test
