// Tests optimal_token_baseline byte for byte against a second implementation, written from the contract. The backend is
// the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "baseline_cases.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/math/exp.h"
#include "rlk/ops/optimal_token_baseline.h"

namespace baseline_test {
namespace {

using linear_test::for_each_backend;
using policy_test::same_bytes;
using policy_test::written;

#if RLK_TEST_HIP
constexpr int kShortCases = 2, kLongCases = 1, kLeast = 1;  // few cases, since lanes are slow fibers
#else
constexpr int kShortCases = 16, kLongCases = 4, kLeast = 20;
#endif
constexpr float kCanary = -12345.0f;

struct Outputs {
  std::vector<float> advantages, returns;
};
Outputs run(rlk::OptimalTokenBaselineParams p) {
  constexpr std::size_t kGuard = 16;
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  Outputs out = {std::vector<float>(slots + kGuard, kCanary), std::vector<float>(slots + kGuard, kCanary)};
  p.advantages = out.advantages.data();
  p.returns = out.returns.data();
#if RLK_TEST_HIP
  policy_test::Workspace workspace(rlk::hip::optimal_token_baseline_workspace_bytes(p, 0));
  p.workspace = workspace.data();
  rlk::hip::optimal_token_baseline(p, 0, 0);
#else
  rlk::cpu::optimal_token_baseline(p);
#endif
  for (auto* values : {&out.advantages, &out.returns}) {
    for (std::size_t i = slots; i < values->size(); ++i) EXPECT_EQ((*values)[i], kCanary) << "guard";
    values->resize(slots);
  }
  return out;
}

// Sums of x up to each position, by chunks of 256.
std::vector<float> scan(const std::vector<float>& x) {
  std::vector<float> sums;
  float before = 0.0f;
  for (std::size_t first = 0; first < x.size(); first += 256) {
    std::vector<float> chunk(256, 0.0f);
    for (std::size_t i = first; i < std::min(x.size(), first + 256); ++i) chunk[i - first] = x[i];
    for (std::size_t h = 1; h < 256; h *= 2) {
      for (std::size_t i = 255; i >= h; --i) chunk[i] = chunk[i] + chunk[i - h];
    }
    for (const float c : chunk) sums.push_back(before + c);
    before = before + chunk[255];
  }
  return sums;
}

Outputs reference(const Batch& b, int* tails) {
  const rlk::OptimalTokenBaselineParams& p = b.params;
  const auto value = [&](const rlk::PolicyTokens& a, std::int64_t s, std::int64_t t) {
    const std::int64_t row = a.token_stride == 0 || !b.sequences.packed() ? s * a.sequence_stride : b.begin(s);
    return a.data[row + t * a.token_stride];
  };
  const auto sequences = static_cast<std::size_t>(b.sequences.num_sequences);
  std::vector<std::vector<float>> weights(sequences), returns(sequences);
  std::vector<std::int64_t> tokens(sequences, 0);
  std::int64_t longest = 0;
  for (std::int64_t s = 0; s < b.sequences.num_sequences; ++s) {
    std::vector<float> w, r;
    longest = std::max(longest, b.length(s));
    for (std::int64_t t = 0; t < b.length(s); ++t) {
      const bool counts = b.counts(s, t);
      tokens[static_cast<std::size_t>(s)] += counts;
      float x = 1.0f - 2.0f * rlk::exp(value(p.logprob, s, t)) + value(p.sum_p_sq, s, t);
      if (x <= 0.0f) x = 0.0f;
      if (p.importance.data != nullptr) {
        const float i = value(p.importance, s, t);
        x = x * (i * i);
      }
      w.push_back(counts ? x : 0.0f);
      r.push_back(counts && p.rewards.token_stride != 0 ? value(p.rewards, s, t) : 0.0f);
    }
    weights[static_cast<std::size_t>(s)] = scan(w);
    r.resize((r.size() + 255) / 256 * 256, 0.0f);
    std::reverse(r.begin(), r.end());
    r = scan(r);
    std::reverse(r.begin(), r.end());
    if (p.rewards.token_stride == 0) std::fill(r.begin(), r.end(), value(p.rewards, s, 0) + 0.0f);
    returns[static_cast<std::size_t>(s)] = r;
  }
  const auto slots = static_cast<std::size_t>(b.sequences.num_slots());
  Outputs out = {std::vector<float>(slots, 0.0f), std::vector<float>(slots, 0.0f)};
  for (std::size_t g = 0; g + 1 < b.groups.size(); ++g) {
    const std::int64_t first = b.groups[g], last = b.groups[g + 1];
    std::vector<std::int64_t> lengths;
    for (std::int64_t s = first; s < last; ++s) lengths.push_back(tokens[static_cast<std::size_t>(s)]);
    std::sort(lengths.rbegin(), lengths.rend());
    for (std::int64_t t = 0; t < longest; ++t) {
      float num = 0.0f, den = 0.0f;
      const auto at = static_cast<std::size_t>(t);
      for (std::int64_t s = first; s < last; ++s) {
        if (t >= b.length(s) || !b.counts(s, t)) continue;
        const auto i = static_cast<std::size_t>(s);
        num = std::fma(written(returns[i][at]), weights[i][at], num);
        den = den + weights[i][at];
      }
      for (std::int64_t s = first; s < last; ++s) {
        if (t >= b.length(s) || !b.counts(s, t)) continue;
        const auto i = static_cast<std::size_t>(s);
        const bool tail = p.zero_tail != 0 && lengths.size() > 1 && tokens[i] == lengths[0] &&
                          lengths[1] < lengths[0] && t >= lengths[1];
        *tails += tail;
        const float baseline = last - first == 1 || tail ? 0.0f : num / (den + p.eps);
        const float advantage = returns[i][at] - baseline;
        out.advantages[b.slot(s, t)] = std::isnan(advantage) ? rlk::canonical_nan() : advantage;
        out.returns[b.slot(s, t)] = written(returns[i][at]);
      }
    }
  }
  return out;
}

TEST(OptimalTokenBaseline, HasTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    int tails = 0;
    for (const auto& shape : policy_test::kShapes) {
      for (const bool packed : {false, true}) {
        for (int i = 0; i < (shape[0] * shape[1] > 2000 ? kLongCases : kShortCases); ++i, ++seed) {
          const Batch b(seed, shape[0], shape[1], packed);
          const Outputs want = reference(b, &tails), got = run(b.params);
          ASSERT_TRUE(same_bytes(got.returns, want.returns)) << backend << ", returns, " << b.text;
          ASSERT_TRUE(same_bytes(got.advantages, want.advantages)) << backend << ", advantages, " << b.text;
        }
      }
    }
    EXPECT_GE(tails, kLeast) << "tokens without a baseline";
  });
}

#if !RLK_TEST_HIP
TEST(OptimalTokenBaseline, OffsetsThatDoNotAscendAreRefused) {
  Batch b(3, 6, 50, true);
  b.cuts64[2] = b.cuts32[2] = -1;
  EXPECT_THROW(run(b.params), rlk::InvalidArgument);
  Batch c(3, 6, 50, false);
  const std::int64_t bad[] = {0, 7, 6};
  c.params.group_offsets = bad;
  c.params.group_dtype = rlk::DType::kInt64;
  c.params.num_groups = 2;
  EXPECT_THROW(run(c.params), rlk::InvalidArgument);
}
#endif

}  // namespace
}  // namespace baseline_test
