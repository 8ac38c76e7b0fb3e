// Tests mismatch_metrics byte for byte against a second implementation, written from the contract. The backend is the
// CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/losses/mismatch_terms.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/mismatch_metrics.h"
#include "rollout_cases.h"

namespace rollout_test {
namespace {

using linear_test::for_each_backend;
using policy_test::Deviations;
using policy_test::limited;
using policy_test::over;
using policy_test::same_bytes;
using policy_test::tree;
using policy_test::written;

#if RLK_TEST_HIP
constexpr int kShortCases = 2, kLongCases = 1;  // few cases, since lanes are slow fibers
constexpr unsigned kPaddedCases = 3;
#else
constexpr int kShortCases = 25, kLongCases = 4;
constexpr unsigned kPaddedCases = 30;
#endif

std::vector<float> run(rlk::MismatchMetricsParams p) {
  constexpr float kCanary = -12345.0f;
  constexpr std::size_t kGuard = 16;
  std::vector<float> metrics(rlk::kMismatchMetrics + kGuard, kCanary);
  p.metrics = metrics.data();
#if RLK_TEST_HIP
  policy_test::Workspace workspace(rlk::hip::mismatch_metrics_workspace_bytes(p, 0));
  p.workspace = workspace.data();
  rlk::hip::mismatch_metrics(p, 0, 0);
#else
  rlk::cpu::mismatch_metrics(p);
#endif
  for (std::size_t i = metrics.size() - kGuard; i < metrics.size(); ++i) EXPECT_EQ(metrics[i], kCanary) << "guard";
  metrics.resize(rlk::kMismatchMetrics);
  return metrics;
}
rlk::MismatchMetricsParams params(const Batch& b, float limit) {
  return {b.sequences, b.train, b.rollout, b.token_mask, limit};
}

constexpr float kEdges[] = {-1.0f, -0.1f, -0.01f, -0.001f, 0.001f, 0.01f, 0.1f, 1.0f};

bool other_bits(float x, float y) { return std::memcmp(&x, &y, 4) != 0 && !(std::isnan(x) && std::isnan(y)); }

std::vector<float> reference(const Batch& b, float limit) {
  constexpr int kTokenSums = 10, kSequenceSums = 8;  // 5 to 8: 1 minus the probabilities, and probabilities
  std::vector<std::vector<float>> probabilities[4];
  std::vector<float> of_sequence[kTokenSums], scalars[kSequenceSums];
  std::int64_t tokens = 0, sequences = 0, differing = 0, nonfinite = 0, bins[rlk::kMismatchBins] = {};
  float most = 0.0f, least_diff = kInf, most_diff = -kInf;
  bool nan_distance = false, nan_diff = false;
  for (std::int64_t s = 0; s < b.sequences.num_sequences; ++s) {
    std::vector<float> terms[kTokenSums + 2];
    for (auto& of : probabilities) of.emplace_back(static_cast<std::size_t>(b.length(s)), Deviations::missing());
    std::int64_t n = 0;
    for (std::int64_t t = 0; t < b.length(s); ++t) {
      if (!b.counts(s, t)) {
        for (auto& list : terms) list.push_back(0.0f);
        continue;
      }
      ++n;
      const float x = b.train_of(s, t), y = b.rollout_of(s, t), d = x - y, c = limited(d, -limit, limit);
      const float p = 0.0f - rlk::expm1(x), q = 0.0f - rlk::expm1(y);
      const float values[] = {d,
                              std::fabs(d),
                              rlk::expm1(d) - policy_test::cut_at(d, policy_test::kLargest),
                              rlk::exp(c),
                              rlk::expm1(c + c),
                              p,
                              q,
                              rlk::exp(x),
                              rlk::exp(y),
                              rlk::exp(c) * rlk::exp(c),
                              x,
                              y};
      for (int i = 0; i < kTokenSums + 2; ++i) terms[i].push_back(values[i]);
      for (int i = 0; i < 4; ++i) probabilities[i].back()[static_cast<std::size_t>(t)] = values[5 + i];
      differing += other_bits(x, y);
      nonfinite += !std::isfinite(d);
      nan_distance = nan_distance || std::isnan(d);
      if (std::fabs(d) > most) most = std::fabs(d);
      int bin = 0;
      while (bin < rlk::kMismatchBins - 1 && d >= kEdges[bin]) ++bin;
      if (!std::isnan(d)) ++bins[bin];
    }
    tokens += n;
    for (int i = 0; i < kTokenSums; ++i) of_sequence[i].push_back(n == 0 ? 0.0f : tree(terms[i]));
    if (n == 0) {
      for (auto& list : scalars) list.push_back(0.0f);
      continue;
    }
    ++sequences;
    const float count = static_cast<float>(n), sum = tree(terms[0]), g = -(sum / count),
                c = limited(sum, -limit, limit);
    const float a = -(tree(terms[kTokenSums]) / count), r = -(tree(terms[kTokenSums + 1]) / count);
    const float values[] = {rlk::exp(a), rlk::exp(r), a, r, rlk::exp(g), g, std::fabs(g), rlk::expm1(c + c)};
    for (int i = 0; i < kSequenceSums; ++i) scalars[i].push_back(values[i]);
    nan_diff = nan_diff || std::isnan(g);
    if (g > most_diff) most_diff = g;
    if (g < least_diff) least_diff = g;
  }
  const float n = static_cast<float>(tokens), count = static_cast<float>(sequences);
  float sums[kTokenSums], means[kSequenceSums];
  for (int i = 0; i < kTokenSums; ++i) sums[i] = tree(of_sequence[i]);
  for (int i = 0; i < kSequenceSums; ++i) means[i] = over(tree(scalars[i]), count);
  const float ratio = over(sums[3], n);
  float correlation = 0.0f;
  const int form[] = {sums[7] < sums[5] ? 2 : 0, sums[8] < sums[6] ? 3 : 1};
  const Deviations p(probabilities[form[0]], sums[5 + form[0]], tokens),
      q(probabilities[form[1]], sums[5 + form[1]], tokens);
  const float v_p = p.square(), v_q = q.square();
  if (v_p != 0.0f && v_q != 0.0f) {
    correlation = limited(p.central(q) / std::sqrt(v_p) / std::sqrt(v_q), -1.0f, 1.0f);
    if (form[0] / 2 != form[1] / 2) correlation = -correlation;
  }
  std::vector<float> m = {n,
                          count,
                          over(sums[1], n),
                          nan_distance ? NAN : most,
                          -over(sums[0], n),
                          over(sums[2], n),
                          ratio,
                          over(ratio * ratio, over(sums[9], n)),
                          over(sums[4], n),
                          means[7],
                          means[0],
                          means[1],
                          means[2],
                          means[3],
                          means[4],
                          means[5],
                          means[6],
                          tokens == 0 ? 0.0f
                          : nan_diff  ? NAN
                                      : least_diff,
                          tokens == 0 ? 0.0f
                          : nan_diff  ? NAN
                                      : most_diff,
                          correlation,
                          over(static_cast<float>(differing), n),
                          over(static_cast<float>(nonfinite), n)};
  for (const std::int64_t bin : bins) m.push_back(over(static_cast<float>(bin), n));
  for (float& x : m) x = written(x);
  return m;
}

TEST(MismatchMetrics, HasTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    for (const auto& shape : kShapes) {
      for (const bool packed : {false, true}) {
        for (int i = 0; i < (shape[0] * shape[1] > 2000 ? kLongCases : kShortCases); ++i, ++seed) {
          const Batch b(seed, shape[0], shape[1], packed);
          const float limit = seed % 3 == 0 ? kInf : seed % 3 == 1 ? 20.0f : 0.2f;
          ASSERT_TRUE(same_bytes(run(params(b, limit)), reference(b, limit))) << backend << ", " << b.text;
        }
      }
    }
  });
}

TEST(MismatchMetrics, PaddingChangesNoBit) {
  for (unsigned seed = 1; seed < kPaddedCases; ++seed) {
    const Batch b(seed, 6, 700, true);
    const Padded padded(b, 1100);
    const rlk::MismatchMetricsParams p = {padded.sequences,
                                          {padded.train.data(), padded.width, 1},
                                          {padded.rollout.data(), padded.width, 1},
                                          rlk::mask_of(padded.mask.data(), padded.width, rlk::DType::kBool),
                                          20.0f};
    EXPECT_TRUE(same_bytes(run(p), run(params(b, 20.0f)))) << b.text;
  }
}

TEST(MismatchMetrics, FourTokensOfALaneHaveTheirOwnBits) {
  for (unsigned seed = 1; seed < 500; ++seed) {
    const Batch b(seed, 1, 4, false);
    const rlk::MismatchMetricsParams p = params(b, 20.0f);
    b.expect_four_alike<rlk::MismatchTerms<rlk::kMismatchDifferences>>(p, {});
    b.expect_four_alike<rlk::MismatchTerms<rlk::kMismatchProbabilities>>(p, {});
    const rlk::MismatchPair pair = {{{{1.0f, 4.0f, 0.1f}, {0.5f, 1.0f, 0.3f}}}, {1, 0}};
    b.expect_four_alike<rlk::CentralTerms<rlk::MismatchMoments>>(p, pair);
  }
}

#if !RLK_TEST_HIP
TEST(MismatchMetrics, CutsThatDoNotAscendAreRefused) {
  for (const int wrong : {0, 1, 2}) {
    Batch b(3, 6, 50, true);
    if (wrong == 0) b.cuts64[0] = b.cuts32[0] = 1;
    if (wrong == 1) b.cuts64[2] = b.cuts32[2] = -1;
    if (wrong == 2) b.cuts64[6] = b.cuts32[6] += 1;
    EXPECT_THROW(run(params(b, 20.0f)), rlk::InvalidArgument);
  }
}
#endif

}  // namespace
}  // namespace rollout_test
