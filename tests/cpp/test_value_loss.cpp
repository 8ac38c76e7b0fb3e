// Tests value_loss byte for byte against a second implementation, written from the contract. The backend is the CPU or,
// with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/losses/value_terms.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/value_loss.h"
#include "token_lanes.h"
#include "token_reference.h"
#include "value_loss_cases.h"

namespace value_test {
namespace {

using linear_test::for_each_backend;
using policy_test::Deviations;
using policy_test::kInf;
using policy_test::kShapes;
using policy_test::over;
using policy_test::same_bytes;
using policy_test::tree;
using policy_test::written;

constexpr float kCanary = -12345.0f;
#if RLK_TEST_HIP
constexpr int kShortCases = 2, kLongCases = 1;  // few cases, since lanes are slow fibers
constexpr unsigned kPaddedCases = 3;
#else
constexpr int kShortCases = 40, kLongCases = 4;
constexpr unsigned kPaddedCases = 30;
#endif

struct Results {
  float loss = 0.0f;
  std::vector<float> metrics, d_value;
};

Results run(rlk::ValueLossParams p) {
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  constexpr std::size_t kGuard = 16;
  Results r;
  std::vector<float> loss(1 + kGuard, kCanary);
  r.metrics.assign(rlk::kValueMetrics + kGuard, kCanary);
  r.d_value.assign(slots + kGuard, kCanary);
  p.loss = loss.data();
  p.metrics = r.metrics.data();
  p.d_value = r.d_value.data();
#if RLK_TEST_HIP
  policy_test::Workspace workspace(rlk::hip::value_loss_workspace_bytes(p, 0));
  p.workspace = workspace.data();
  rlk::hip::value_loss(p, 0, 0);
#else
  rlk::cpu::value_loss(p);
#endif
  for (auto* array : {&loss, &r.metrics, &r.d_value}) {
    for (std::size_t i = array->size() - kGuard; i < array->size(); ++i) EXPECT_EQ((*array)[i], kCanary) << "guard";
    array->resize(array->size() - kGuard);
  }
  r.loss = loss[0];
  return r;
}

// A second implementation of the contract, one sequence at a time.
Results reference(const rlk::ValueLossParams& p) {
  const rlk::ValueSpec& s = p.spec;
  const rlk::Sequences& q = p.sequences;
  const auto cut = [&](std::int64_t i) {
    return q.cu_dtype == rlk::DType::kInt64 ? static_cast<const std::int64_t*>(q.cu_seqlens)[i]
                                            : static_cast<const std::int32_t*>(q.cu_seqlens)[i];
  };
  const auto length = [&](std::int64_t i) { return q.packed() ? cut(i + 1) - cut(i) : q.num_tokens; };
  const auto place = [&](std::int64_t i, std::int64_t t, std::int64_t stride) {
    return (q.packed() ? cut(i) : i * stride) + t;
  };
  const auto counts = [&](std::int64_t i, std::int64_t t) {
    return policy_test::is_set(p.mask, place(i, t, p.mask.row_stride));
  };
  std::vector<std::int64_t> number(static_cast<std::size_t>(q.num_sequences));
  std::int64_t tokens = 0, nonempty = 0;
  for (std::int64_t i = 0; i < q.num_sequences; ++i) {
    std::int64_t& n = number[static_cast<std::size_t>(i)];
    for (std::int64_t t = 0; t < length(i); ++t) n += counts(i, t);
    tokens += n;
    nonempty += n > 0;
  }
  float d = 1.0f;
  if (s.denominator == rlk::DenominatorKind::kTokens) d = static_cast<float>(tokens);
  if (s.denominator == rlk::DenominatorKind::kSequences) d = static_cast<float>(q.num_sequences);
  if (s.denominator == rlk::DenominatorKind::kSequencesWithTokens) d = static_cast<float>(nonempty);
  if (p.denominator_value != 0.0f) d = p.denominator_value;

  const auto h = [&](float x) { return std::fabs(x) > s.huber ? s.huber * (std::fabs(x) - s.huber / 2) : x / 2 * x; };
  Results r;
  r.d_value.assign(static_cast<std::size_t>(q.num_slots()), 0.0f);
  constexpr int kSums = 6;
  std::vector<float> of_sequences[kSums + 1];
  std::vector<std::vector<float>> errors, targets;
  float clipped = 0.0f, outside = 0.0f;
  for (std::int64_t i = 0; i < q.num_sequences; ++i) {
    const std::int64_t n = number[static_cast<std::size_t>(i)];
    float weight = over(s.scale, d);
    if (s.horizon != 0.0f) weight = weight / s.horizon;
    if (s.sequence_mean) weight = over(weight, static_cast<float>(n));
    std::vector<float> terms[kSums];
    for (auto& term : terms) term.assign(static_cast<std::size_t>(length(i)), 0.0f);
    for (auto* of : {&errors, &targets}) of->emplace_back(terms[0].size(), Deviations::missing());
    for (std::int64_t t = 0; t < length(i); ++t) {
      if (!counts(i, t)) continue;
      const auto at = [&](const rlk::PolicyTokens& a) { return a.data[place(i, t, a.sequence_stride)]; };
      const float v = at(p.value), target = at(p.returns), old = p.old_value.data ? at(p.old_value) : 0.0f;
      const bool below = v<old - s.clip, above = v> old + s.clip, is_outside = below || above;
      const float w = std::isnan(old) ? old : below ? old - s.clip : above ? old + s.clip : v;
      const float x = v - target, of_v = h(x), of_w = h(w - target);
      float slope = std::fabs(x) > s.huber ? std::copysign(s.huber, x) : x, loss = of_v;
      if (is_outside && of_w == of_v) slope = 0.5f * slope;
      if (is_outside && of_w > of_v) {
        slope = 0.0f;
        loss = of_w;
        clipped += 1;
      }
      if (std::isnan(of_w)) slope = loss = of_w;
      outside += is_outside;
      if (p.token_weight.data != nullptr) {
        slope = policy_test::times(slope, at(p.token_weight));
        loss = policy_test::times(loss, at(p.token_weight));
      }
      const float e = target - v;
      errors.back()[static_cast<std::size_t>(t)] = e;
      targets.back()[static_cast<std::size_t>(t)] = target;
      const float values[kSums] = {loss, v, target, e, e * e, target * target};
      for (int k = 0; k < kSums; ++k) terms[k][static_cast<std::size_t>(t)] = values[k];
      const float gradient = policy_test::weighted(weight, slope);
      r.d_value[static_cast<std::size_t>(place(i, t, q.num_tokens))] =
          std::isnan(gradient) ? rlk::canonical_nan() : gradient;
    }
    for (int k = 0; k < kSums; ++k) of_sequences[k].push_back(tree(terms[k]));
    of_sequences[kSums].push_back(policy_test::weighted(weight, of_sequences[0].back()));
  }
  float sums[kSums + 1];
  for (int k = 0; k <= kSums; ++k) sums[k] = tree(of_sequences[k]);
  const float n = static_cast<float>(tokens);
  const Deviations of_errors(errors, sums[3], tokens), of_returns(targets, sums[2], tokens);
  const float v_e = of_errors.square(), v_r = of_returns.square();
  const float unit = of_errors.unit() / of_returns.unit();
  float explained = 0.0f;
  if (v_r != 0.0f) explained = v_e == 0.0f && !std::isnan(v_r) ? 1.0f : 1.0f - v_e / v_r * unit * unit;
  r.loss = written(sums[kSums]);
  r.metrics = {r.loss, n, static_cast<float>(nonempty), written(d)};
  for (int k = 0; k < kSums; ++k) r.metrics.push_back(written(sums[k]));
  for (const float x : {over(clipped, n), over(outside, n), over(sums[1], n), over(sums[2], n), explained}) {
    r.metrics.push_back(written(x));
  }
  return r;
}

TEST(ValueLoss, HasTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    for (const auto& shape : kShapes) {
      for (const bool packed : {false, true}) {
        const bool is_long = shape[0] * shape[1] > 2000;
        for (int i = 0; i < (is_long ? kLongCases : kShortCases); ++i) {
          Case c;
          make_case(seed++, shape[0], shape[1], packed, &c);
          const Results got = run(c.p), want = reference(c.p);
          EXPECT_TRUE(same_bytes({got.loss}, {want.loss})) << backend << ", " << c.text << " loss";
          EXPECT_TRUE(same_bytes(got.metrics, want.metrics)) << backend << ", " << c.text << " metrics";
          EXPECT_TRUE(same_bytes(got.d_value, want.d_value)) << backend << ", " << c.text << " d_value";
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  });
}

TEST(ValueLoss, PaddingChangesNoBit) {
  for (unsigned seed = 1; seed < kPaddedCases; ++seed) {
    Case packed;
    make_case(seed, 6, 700, true, &packed);
    if (packed.p.mask.data == nullptr) continue;
    const rlk::Sequences& q = packed.p.sequences;
    constexpr std::int64_t kWidth = 1100;
    Case padded;
    padded.p = packed.p;
    padded.p.sequences = {nullptr, rlk::DType::kInt32, q.num_sequences, kWidth};
    const auto bytes = static_cast<std::size_t>(packed.p.mask.bytes);
    const auto slots = static_cast<std::size_t>(q.num_sequences * kWidth);
    padded.mask.assign(slots * bytes, 0);
    for (auto& array : padded.arrays) array.assign(slots, NAN);
    for (std::int64_t s = 0; s < q.num_sequences; ++s) {
      for (std::int64_t t = 0; t < packed.cuts64[s + 1] - packed.cuts64[s]; ++t) {
        const auto from = static_cast<std::size_t>(packed.cuts64[s] + t), to = static_cast<std::size_t>(s * kWidth + t);
        for (int k = 0; k < kArrays; ++k) padded.arrays[k][to] = packed.arrays[k][from];
        std::memcpy(&padded.mask[to * bytes], &packed.mask[from * bytes], bytes);
      }
    }
    padded.p.mask = {padded.mask.data(), kWidth, packed.p.mask.bytes, packed.p.mask.is_float};
    padded.p.value = {padded.arrays[0].data(), kWidth, 1};
    if (packed.p.old_value.data != nullptr) padded.p.old_value = {padded.arrays[1].data(), kWidth, 1};
    padded.p.returns = {padded.arrays[2].data(), kWidth, 1};
    if (packed.p.token_weight.data != nullptr) padded.p.token_weight = {padded.arrays[3].data(), kWidth, 1};
    const Results a = run(packed.p), b = run(padded.p);
    EXPECT_TRUE(same_bytes(b.metrics, a.metrics)) << packed.text;
    for (std::int64_t s = 0; s < q.num_sequences; ++s) {
      for (std::int64_t t = 0; t < packed.cuts64[s + 1] - packed.cuts64[s]; ++t) {
        const float x = a.d_value[static_cast<std::size_t>(packed.cuts64[s] + t)];
        const float y = b.d_value[static_cast<std::size_t>(s * kWidth + t)];
        ASSERT_EQ(std::memcmp(&x, &y, 4), 0) << packed.text << " sequence " << s << " token " << t;
      }
    }
  }
}

// Two equal operands get half of the gradient each, and a bound counts as inside.
TEST(ValueLoss, TiesAreTorchsMaximumAndBoundsItsClamp) {
  const float value[] = {1.0f, 0.5f, 0.25f, 1.0f, 1.0f}, old[] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  const float returns[] = {0.75f, 1.0f, 2.0f, 2.0f, -1.0f};
  // Cases: outside, halfway between the value and its bound; on the bound; inside; outside, where the bound is worse;
  // outside, where the value is worse.
  const float want[] = {0.125f, -0.5f, -1.75f, 0.0f, 2.0f};
  rlk::ValueLossParams p;
  p.sequences = {nullptr, rlk::DType::kInt32, 1, 5};
  p.value = {value, 5, 1};
  p.old_value = {old, 5, 1};
  p.returns = {returns, 5, 1};
  p.spec.clip = 0.5f;
  p.spec.huber = kInf;
  p.denominator_value = 1.0f;
  const Results got = run(p);
  EXPECT_TRUE(same_bytes(got.d_value, {want, want + 5}));
  EXPECT_EQ(got.metrics[rlk::kValueMetricClipFraction], 0.2f);
  EXPECT_EQ(got.metrics[rlk::kValueMetricOutsideFraction], 0.6f);
}

TEST(ValueLoss, FourTokensOfALaneHaveTheirOwnBits) {
  for (unsigned seed = 1; seed < 1000; ++seed) {
    Case c;
    make_case(seed, 1, 4, false, &c);
    const bool counts[4] = {true, seed % 2 != 0, seed % 3 != 0, true};
    const std::vector<const float*> arrays = {c.arrays[0].data(), c.arrays[1].data(), c.arrays[2].data(),
                                              c.arrays[3].data()};
    policy_test::expect_four_alike<rlk::ValueTokenTerms>(c.p, {4, 0.75f}, arrays, counts, c.text);
  }
}

#if !RLK_TEST_HIP
TEST(ValueLoss, CutsThatDoNotAscendAreRefused) {
  for (const int wrong : {0, 1, 2}) {
    Case c;
    make_case(3, 6, 50, true, &c);
    if (wrong == 0) c.cuts64[0] = c.cuts32[0] = 1;
    if (wrong == 1) c.cuts64[2] = c.cuts32[2] = -1;
    if (wrong == 2) c.cuts64[6] = c.cuts32[6] += 1;
    EXPECT_THROW(run(c.p), rlk::InvalidArgument);
  }
}
#endif

}  // namespace
}  // namespace value_test
