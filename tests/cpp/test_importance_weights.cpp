// Tests importance_weights byte for byte against a second implementation, written from the contract, and against the
// weights that policy_loss multiplies by. The backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/losses/rejection_terms.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/importance_weights.h"
#include "rlk/ops/policy_loss.h"
#include "rollout_cases.h"

namespace rollout_test {
namespace {

using linear_test::for_each_backend;
using policy_test::Deviations;
using policy_test::limited;
using policy_test::same_bytes;
using policy_test::tree;
using policy_test::written;
using rlk::ImportanceLevel;
using rlk::ImportanceSpec;
using rlk::RejectionBounds;

#if RLK_TEST_HIP
constexpr int kShortCases = 3, kLongCases = 1;  // few cases, since lanes are slow fibers
constexpr unsigned kPaddedCases = 4;
#else
constexpr int kShortCases = 40, kLongCases = 6;
constexpr unsigned kPaddedCases = 40;
#endif

struct Results {
  std::vector<float> weights, kept, metrics;
};

Results run(rlk::ImportanceWeightsParams p) {
  constexpr float kCanary = -12345.0f;
  constexpr std::size_t kGuard = 16;
  const auto slots = static_cast<std::size_t>(p.sequences.num_slots());
  Results r = {std::vector<float>(slots + kGuard, kCanary), std::vector<float>(slots + kGuard, kCanary),
               std::vector<float>(rlk::kImportanceMetrics + kGuard, kCanary)};
  if (p.metrics != nullptr) p.metrics = r.metrics.data();
  p.weights = r.weights.data();
  p.kept = r.kept.data();
#if RLK_TEST_HIP
  policy_test::Workspace workspace(rlk::hip::importance_weights_workspace_bytes(p, 0));
  p.workspace = workspace.data();
  rlk::hip::importance_weights(p, 0, 0);
#else
  rlk::cpu::importance_weights(p);
#endif
  const auto trim = [&](std::vector<float>* array, std::size_t size) {
    for (std::size_t i = size; i < array->size(); ++i) EXPECT_EQ((*array)[i], kCanary) << "guard";
    array->resize(size);
  };
  trim(&r.weights, slots);
  trim(&r.kept, slots);
  trim(&r.metrics, p.metrics == nullptr ? 0 : rlk::kImportanceMetrics);
  return r;
}

// Every criterion alone and all together, with thresholds that some sequences of the batches meet.
ImportanceSpec random_spec(unsigned seed) {
  std::mt19937 random(seed + 7);
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  constexpr ImportanceLevel kLevels[] = {ImportanceLevel::kToken, ImportanceLevel::kSequence,
                                         ImportanceLevel::kGeometric};
  ImportanceSpec s;
  s.level = kLevels[random() % 3];
  s.zero_outside = one_in(2);
  s.normalize = one_in(2);
  s.low = one_in(2) ? -kInf : 0.8f;
  s.high = one_in(4) ? kInf : 1.3f;
  s.limit = one_in(3) ? kInf : one_in(2) ? 20.0f : 0.3f;
  const auto bound = [&](RejectionBounds* b, float scale) {
    if (one_in(3)) b->k1_low = -0.1f * scale;
    if (one_in(3)) b->k1_high = 0.2f * scale;
    if (one_in(4)) b->k2 = 0.05f * scale;
    if (one_in(4)) b->k3 = 0.04f * scale;
  };
  if (one_in(2)) bound(&s.token, 3.0f);
  if (one_in(3)) bound(&s.sum, 5.0f);
  if (one_in(3)) bound(&s.mean, 1.0f);
  if (one_in(4)) s.most.k2 = 0.4f;
  if (one_in(4)) s.most.k3 = 0.3f;
  if (one_in(3)) s.veto_below = -0.9f;
  return s;
}

bool allowed(const RejectionBounds& b, float k1, float k2, float k3) {
  if (b.k1_low > -kInf && !(k1 >= b.k1_low)) return false;
  if (b.k1_high < kInf && !(k1 <= b.k1_high)) return false;
  if (b.k2 < kInf && !(k2 <= b.k2)) return false;
  return !(b.k3 < kInf && !(k3 <= b.k3));
}

float ratio_of(const ImportanceSpec& s, float z) { return rlk::exp(limited(z, -s.limit, s.limit)); }
float weight_of(const ImportanceSpec& s, float z) {
  const float e = ratio_of(s, z);
  if (s.zero_outside) return e < s.low || e > s.high ? 0.0f : e;
  return limited(e, s.low, s.high);
}

float share(std::int64_t part, std::int64_t of) {
  return of == 0 ? 0.0f : static_cast<float>(part) / static_cast<float>(of);
}
// The least and the largest value; a NaN is both.
struct Range {
  float least = kInf, most = 0.0f;
  void take(float x) {
    if (std::isnan(x) || std::isnan(most)) {
      least = most = NAN;
    } else {
      least = x < least ? x : least;
      most = x > most ? x : most;
    }
  }
};
// Sums, minima and maxima that the metrics are made of, added one sequence at a time.
struct Statistics {
  explicit Statistics(const ImportanceSpec& spec) : s(spec), low(s.low > -kInf ? s.low : 1.0f / s.high) {}

  const ImportanceSpec& s;
  float low;
  std::vector<float> sums, means;
  std::vector<std::vector<float>> weights;  // weights by position
  std::vector<std::int64_t> counts_of;
  Range ratio, weight, of_sequences, off;
  std::int64_t tokens = 0, sequences = 0, below = 0, above = 0, sequences_below = 0, sequences_above = 0;
  std::int64_t refused = 0, refusing = 0;

  // Adds a sequence's positions; masked ones add 0.
  void add(const std::vector<float>& w, const std::vector<float>& e, const std::vector<bool>& counts,
           std::int64_t not_kept) {
    std::vector<float> ws, du, es;
    weights.emplace_back(w.size(), Deviations::missing());
    std::int64_t n = 0, under = 0, over = 0;
    for (std::size_t i = 0; i < w.size(); ++i) {
      ws.push_back(counts[i] ? w[i] : 0.0f);
      du.push_back(counts[i] ? w[i] - 1.0f : 0.0f);
      es.push_back(counts[i] ? e[i] : 0.0f);
      if (!counts[i]) continue;
      ++n;
      weights.back()[i] = written(w[i]);
      ratio.take(e[i]);
      weight.take(w[i]);
      under += e[i] < low;
      over += e[i] > s.high;
    }
    counts_of.push_back(n);
    if (n == 0) {
      for (auto* of : {&sums, &means}) of->push_back(0.0f);
      return;
    }
    const float count = static_cast<float>(n), deviation = tree(du) / count, mean = tree(ws) / count;
    sums.push_back(tree(ws));
    means.push_back(mean);
    of_sequences.take(mean);
    off.take(std::fabs(deviation));
    tokens += n;
    ++sequences;
    const bool of_token = s.level == ImportanceLevel::kToken;
    below += of_token ? under : under > 0;
    above += of_token ? over : over > 0;
    sequences_below += tree(es) / count < low;
    sequences_above += tree(es) / count > s.high;
    refused += not_kept;
    refusing += not_kept > 0;
  }
  std::vector<float> metrics(float divisor) const {
    std::vector<float> m(rlk::kImportanceMetrics, 0.0f);
    m[rlk::kImportanceDivisor] = divisor;
    if (tokens == 0) return m;
    const std::int64_t units = s.level == ImportanceLevel::kToken ? tokens : sequences;
    const float mean = tree(sums) / static_cast<float>(tokens), seq_mean = tree(means) / static_cast<float>(sequences);
    const Deviations of_tokens(weights, tree(sums), tokens);
    const float spread = of_tokens.square() / static_cast<float>(tokens), scaled_mean = of_tokens.mean();
    const float shift = of_tokens.difference(mean, seq_mean);
    std::vector<float> of_means, squares;
    for (std::size_t q = 0; q < means.size(); ++q) {
      const float d =
          counts_of[q] == 0 ? 0.0f : tree(of_tokens.by_sequence[q]) / static_cast<float>(counts_of[q]) + shift;
      of_means.push_back(d);
      squares.push_back(d * d);
    }
    float seq_spread = std::fma(-tree(of_means), tree(of_means) / static_cast<float>(sequences), tree(squares));
    seq_spread = seq_spread < 0.0f || of_tokens.constant() || sequences < 2
                     ? 0.0f
                     : seq_spread / static_cast<float>(sequences - 1);
    m[rlk::kImportanceNumTokens] = static_cast<float>(tokens);
    m[rlk::kImportanceNumSequences] = static_cast<float>(sequences);
    m[rlk::kImportanceWeightMean] = written(mean);
    m[rlk::kImportanceWeightStd] = written(std::sqrt(spread) * of_tokens.unit());
    m[rlk::kImportanceWeightMin] = written(weight.least);
    m[rlk::kImportanceWeightMax] = written(weight.most);
    m[rlk::kImportanceRatioMin] = written(ratio.least);
    m[rlk::kImportanceRatioMax] = written(ratio.most);
    m[rlk::kImportanceFractionLow] = share(below, units);
    m[rlk::kImportanceFractionHigh] = share(above, units);
    m[rlk::kImportanceEss] = written(scaled_mean == 0.0f ? 0.0f : 1.0f / (1.0f + spread / scaled_mean / scaled_mean));
    m[rlk::kImportanceSeqMean] = written(seq_mean);
    m[rlk::kImportanceSeqStd] = written(std::sqrt(seq_spread) * of_tokens.unit());
    m[rlk::kImportanceSeqMin] = written(of_sequences.least);
    m[rlk::kImportanceSeqMax] = written(of_sequences.most);
    m[rlk::kImportanceSeqDeviationMax] = written(off.most);
    m[rlk::kImportanceSeqFractionLow] = share(sequences_below, sequences);
    m[rlk::kImportanceSeqFractionHigh] = share(sequences_above, sequences);
    m[rlk::kImportanceRejectedFraction] = share(refused, tokens);
    m[rlk::kImportanceSeqRejectedFraction] = share(refusing, sequences);
    return m;
  }
};

Results reference(const Batch& b, const ImportanceSpec& s) {
  const auto slots = static_cast<std::size_t>(b.sequences.num_slots());
  Results r = {std::vector<float>(slots, 0.0f), std::vector<float>(slots, 0.0f), {}};
  Statistics statistics{s};
  std::vector<float> to_average;
  std::int64_t tokens = 0, sequences = 0;
  for (std::int64_t q = 0; q < b.sequences.num_sequences; ++q) {
    std::vector<float> ds, cs, k2s, k3s;
    std::int64_t n = 0;
    float most_k2 = 0.0f, most_k3 = 0.0f;
    bool any_nan = false, kept = true;
    for (std::int64_t t = 0; t < b.length(q); ++t) {
      const bool counts = b.counts(q, t);
      const float d = counts ? b.train_of(q, t) - b.rollout_of(q, t) : 0.0f, c = limited(d, -s.limit, s.limit);
      const float k3 = rlk::expm1(c) - policy_test::cut_at(c, policy_test::kLargest);
      ds.push_back(d);
      cs.push_back(c);
      k2s.push_back(0.5f * c * c);
      k3s.push_back(k3 < 0.0f ? 0.0f : k3);
      if (!counts) continue;
      ++n;
      any_nan = any_nan || std::isnan(k2s.back()) || std::isnan(k3s.back());
      most_k2 = std::fmax(most_k2, k2s.back());
      most_k3 = std::fmax(most_k3, k3s.back());
      if (s.veto_below > -kInf && !(d >= s.veto_below)) kept = false;
    }
    const float of_k3 = any_nan ? NAN : most_k3, of_k2 = any_nan ? NAN : most_k2;
    if (n == 0) {
      to_average.push_back(0.0f);
      statistics.add({}, {}, {}, 0);
      continue;
    }
    tokens += n;
    ++sequences;
    const float count = static_cast<float>(n), k1 = -tree(cs), k2 = tree(k2s), k3 = tree(k3s);
    kept = kept && allowed(s.sum, k1, k2, k3) && allowed(s.mean, k1 / count, k2 / count, k3 / count);
    kept = kept && allowed(s.most, 0.0f, of_k2, of_k3);
    const float z = s.level == ImportanceLevel::kSequence ? tree(ds) : tree(ds) / count, of_sequence = weight_of(s, z);
    std::vector<float> weights, ratios;
    std::vector<bool> are_counted;
    std::int64_t not_kept = 0;
    for (std::int64_t t = 0; t < b.length(q); ++t) {
      const auto i = static_cast<std::size_t>(t);
      const bool counts = b.counts(q, t);
      const float w = s.level == ImportanceLevel::kToken ? weight_of(s, ds[i]) : of_sequence;
      weights.push_back(counts ? w : 0.0f);
      ratios.push_back(ratio_of(s, s.level == ImportanceLevel::kToken ? ds[i] : z));
      are_counted.push_back(counts);
      if (!counts) continue;
      r.weights[b.slot(q, t)] = written(w);
      r.kept[b.slot(q, t)] = kept && allowed(s.token, -cs[i], k2s[i], k3s[i]) ? 1.0f : 0.0f;
      not_kept += r.kept[b.slot(q, t)] == 0.0f;
    }
    statistics.add(weights, ratios, are_counted, not_kept);
    to_average.push_back(s.level == ImportanceLevel::kToken ? tree(weights) : of_sequence);
  }
  r.metrics = statistics.metrics(1.0f);
  if (!s.normalize || sequences == 0) return r;
  const float mean = tree(to_average) / static_cast<float>(s.level == ImportanceLevel::kToken ? tokens : sequences);
  if (mean <= 1e-8f) return r;
  r.metrics[rlk::kImportanceDivisor] = mean;
  for (float& w : r.weights) w = w == 0.0f ? 0.0f : written(w / mean);
  return r;
}

rlk::ImportanceWeightsParams params(const Batch& b, const ImportanceSpec& s) {
  static float wanted;  // run() replaces it
  return {b.sequences, b.train, b.rollout, b.token_mask, s, nullptr, nullptr, &wanted};
}

TEST(ImportanceWeights, HaveTheBytesOfTheContract) {
  for_each_backend([](const std::string& backend) {
    unsigned seed = 1;
    std::int64_t kept = 0, refused = 0;
    for (const auto& shape : kShapes) {
      for (const bool packed : {false, true}) {
        for (int i = 0; i < (shape[0] * shape[1] > 2000 ? kLongCases : kShortCases); ++i, ++seed) {
          const Batch b(seed, shape[0], shape[1], packed);
          const ImportanceSpec s = random_spec(seed);
          const Results got = run(params(b, s)), want = reference(b, s);
          ASSERT_TRUE(same_bytes(got.weights, want.weights)) << backend << ", weights, " << b.text;
          ASSERT_TRUE(same_bytes(got.kept, want.kept)) << backend << ", kept, " << b.text;
          ASSERT_TRUE(same_bytes(got.metrics, want.metrics)) << backend << ", metrics, " << b.text;
          rlk::ImportanceWeightsParams without = params(b, s);
          without.metrics = nullptr;
          ASSERT_TRUE(same_bytes(run(without).weights, want.weights)) << backend << ", weights alone, " << b.text;
          for (const float x : want.kept) (x != 0.0f ? kept : refused) += 1;
        }
      }
    }
    EXPECT_GT(kept, 100);  // otherwise thresholds that no batch meets would hide a criterion
    EXPECT_GT(refused, 100);
  });
}

TEST(ImportanceWeights, PaddingChangesNoBit) {
  for (unsigned seed = 1; seed < kPaddedCases; ++seed) {
    const Batch b(seed, 6, 700, true);
    const Padded padded(b, 1100);
    const ImportanceSpec s = random_spec(seed);
    const Results one = run(params(b, s)),
                  other = run({padded.sequences,
                               {padded.train.data(), padded.width, 1},
                               {padded.rollout.data(), padded.width, 1},
                               rlk::mask_of(padded.mask.data(), padded.width, rlk::DType::kBool),
                               s,
                               nullptr,
                               nullptr,
                               params(b, s).metrics});
    Results back = {std::vector<float>(one.weights.size()), std::vector<float>(one.kept.size()), other.metrics};
    for (std::int64_t q = 0; q < b.sequences.num_sequences; ++q) {
      for (std::int64_t t = 0; t < padded.width; ++t) {
        const auto from = static_cast<std::size_t>(q * padded.width + t);
        if (t < b.length(q)) {
          back.weights[b.slot(q, t)] = other.weights[from];
          back.kept[b.slot(q, t)] = other.kept[from];
        } else {
          ASSERT_TRUE(other.weights[from] == 0.0f && other.kept[from] == 0.0f) << b.text;
        }
      }
    }
    EXPECT_TRUE(same_bytes(back.weights, one.weights)) << b.text;
    EXPECT_TRUE(same_bytes(back.kept, one.kept)) << b.text;
    EXPECT_TRUE(same_bytes(back.metrics, one.metrics)) << b.text;
  }
}

TEST(ImportanceWeights, FourTokensOfALaneHaveTheirOwnBits) {
  for (unsigned seed = 1; seed < 1000; ++seed) {
    const Batch b(seed, 1, 4, false);
    const rlk::ImportanceWeightsParams p = params(b, random_spec(seed));
    b.expect_four_alike<rlk::ImportanceStatisticsTerms>(p, {});
    const rlk::ImportanceFactors factors = {1.25f, 1.5f, seed % 3 != 0, seed % 7 == 0};
    b.expect_four_alike<rlk::ImportanceTokenTerms<rlk::ImportanceForm::kAlone>>(p, factors);
    b.expect_four_alike<rlk::ImportanceTokenTerms<rlk::ImportanceForm::kMeasured>>(p, factors);
  }
}

#if !RLK_TEST_HIP
// With A = -1, one token and l = 1 or -1, the term is -A l w, so policy_loss's policy_sum is w l.
TEST(ImportanceWeights, AreThoseOfThePolicyLoss) {
  for (unsigned seed = 1; seed < 200; ++seed) {
    const Batch b(seed, 3, 41, false);
    ImportanceSpec s = random_spec(seed);
    s.normalize = 0;
    const Results got = run(params(b, s));
    rlk::PolicyLossParams p;
    p.sequences = b.sequences;
    p.old_logprob = b.train;
    p.importance = b.rollout;
    p.mask = b.token_mask.data == nullptr ? b.p.mask : b.token_mask;
    if (b.token_mask.data == nullptr) continue;  // policy_loss does not take such a batch
    const auto slots = static_cast<std::size_t>(b.sequences.num_slots());
    const std::vector<float> minus(slots, -1.0f);
    p.logprob = {minus.data(), b.sequences.num_tokens, 1};
    p.advantage = {minus.data(), b.sequences.num_tokens, 1};
    p.spec.surrogate = rlk::Surrogate::kLogprob;
    p.spec.log_ratio_min = -kInf;
    p.spec.log_ratio_max = p.spec.kl_limit = p.spec.kl_input_limit = p.spec.drop_above = kInf;
    p.spec.importance = s.level;
    p.spec.importance_mask = s.zero_outside;
    p.spec.importance_low = s.low;
    p.spec.importance_high = s.high;
    p.spec.importance_limit = s.limit;
    p.spec.denominator = rlk::DenominatorKind::kOne;
    std::vector<float> slopes(slots), metrics(rlk::kPolicyMetrics);
    float loss = 0.0f;
    p.loss = &loss;
    p.metrics = metrics.data();
    p.d_logprob = slopes.data();  // -A w
    rlk::cpu::policy_loss_alone(p);
    for (float& x : slopes) x = x == 0.0f ? 0.0f : x;
    EXPECT_TRUE(same_bytes(got.weights, slopes)) << b.text;
  }
}

TEST(ImportanceWeights, CutsThatDoNotAscendAreRefused) {
  for (const int wrong : {0, 1, 2}) {
    Batch b(3, 6, 50, true);
    if (wrong == 0) b.cuts64[0] = b.cuts32[0] = 1;
    if (wrong == 1) b.cuts64[2] = b.cuts32[2] = -1;
    if (wrong == 2) b.cuts64[6] = b.cuts32[6] += 1;
    EXPECT_THROW(run(params(b, random_spec(1))), rlk::InvalidArgument);
  }
}

TEST(ImportanceWeights, BoundsTheWrongWayRoundAreRefused) {
  for (const float low : {2.0f, NAN}) {
    const Batch b(3, 6, 50, true);
    rlk::ImportanceSpec spec = random_spec(1);
    spec.low = low;
    spec.high = 1.0f;
    EXPECT_THROW(run(params(b, spec)), rlk::InvalidArgument);
  }
}
#endif

}  // namespace
}  // namespace rollout_test
