// Tests preference_loss and its gradient bit for bit against a second implementation, written from the contract. The
// backend is the CPU or, with RLK_TEST_HIP, HIP. The reference shares only the functions of math/ with the backends.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "rlk/backends.h"
#include "rlk/math/exp.h"
#include "rlk/math/expm1.h"
#include "rlk/math/log2.h"
#include "rlk/math/sigmoid.h"
#include "rlk/ops/preference_loss.h"
#include "sequence_cases.h"
#include "sum_reference.h"

namespace sequence_test {
namespace {

using linear_test::for_each_backend;
using rlk::Preference;
using rlk::PreferenceAverage;
using rlk::PreferenceLossBackwardParams;
using rlk::PreferenceLossParams;
using rlk::PreferenceScore;
using rlk::PreferenceSort;

#if RLK_TEST_HIP
void run(const PreferenceLossParams& p) { rlk::hip::preference_loss(p, 0, 0); }
void run(const PreferenceLossBackwardParams& p) { rlk::hip::preference_loss_backward(p, 0, 0); }
#else
void run(const PreferenceLossParams& p) { rlk::cpu::preference_loss(p); }
void run(const PreferenceLossBackwardParams& p) { rlk::cpu::preference_loss_backward(p); }
#endif

using Floats = std::vector<float>;

float P(float v) { return rlk::logsigmoid(v); }
float S(float v) { return rlk::sigmoid(v); }
float nan_of(float x) { return std::isnan(x) ? std::bit_cast<float>(0x7fc00000) : x; }
Floats canonical(Floats values) {
  for (float& x : values) x = nan_of(x);
  return values;
}
float M(float v) { return v > -rlk::kLn2 ? rlk::kLn2 * rlk::log2(-rlk::expm1(v)) : rlk::log1p(-rlk::exp(v)); }

struct Element {
  float x, s, h, reward, n, aligned;
  bool empty;
};
float times(float x, float y) {
  const float product = x * y;
  return std::isnan(product) && !std::isnan(x) && !std::isnan(y) ? 0.0f : product;
}

Element element(const PreferenceLossParams& p, const rlk::PreferenceSide& side, std::int64_t i) {
  Element e{};
  e.empty = side.count && side.count[i * side.count_stride] < 1;
  e.n = side.count ? static_cast<float>(std::max<std::int64_t>(side.count[i * side.count_stride], 1)) : 1.0f;
  e.x = side.policy[i * side.policy_stride];
  if (side.reference) e.x = e.x - side.reference[i * side.reference_stride];
  if (p.average == PreferenceAverage::kLogprob) e.x = e.x / e.n;
  switch (p.score) {
    case PreferenceScore::kLogRatio:
      e.s = e.x;
      e.h = 1;
      break;
    case PreferenceScore::kForwardKl:
      e.h = rlk::exp(-e.x);
      e.s = -rlk::expm1(-e.x);
      break;
    case PreferenceScore::kJsDivergence:
      e.s = rlk::kLn2 + P(e.x);
      e.h = S(-e.x);
      break;
    case PreferenceScore::kAlphaDivergence: {
      const float c = p.alpha - 1.0f, t = c * e.x;
      e.s = rlk::expm1(std::isnan(t) ? t : std::min(t, 80.0f)) / c;
      e.h = t > 80.0f ? 0.0f : rlk::exp(t);
      break;
    }
    case PreferenceScore::kAlphaPo: {
      const float t = -p.alpha * e.x;
      e.s = -rlk::expm1(t) / p.alpha;
      e.h = rlk::exp(t);
    }
  }
  e.reward = p.beta * (p.score == PreferenceScore::kAlphaPo ? e.s : e.x);
  if (p.average == PreferenceAverage::kScore) e.s = e.s / e.n;
  if (p.average != PreferenceAverage::kNone) e.h = e.h / e.n;
  if (side.aligned) e.aligned = side.aligned[i * side.aligned_stride];
  if (side.aligned && side.count) e.aligned = e.aligned / e.n;
  return e;
}

struct Value {
  float loss, g_w, g_l;
};
Element of_ratio(float x) { return {x, x, 1.0f, 0.0f, 1.0f, 0.0f, false}; }

Value value(const PreferenceLossParams& p, Preference kind, const Element& chosen, const Element& rejected) {
  const float w = chosen.s, l = rejected.s;
  float difference = w - l;
  if (std::isinf(w) && w == l) difference = chosen.x == rejected.x ? 0.0f : (chosen.x - rejected.x) * INFINITY;
  if (std::isnan(chosen.x - rejected.x)) difference = w - l;
  const float delta = difference - p.margin, z = p.beta * delta, c = p.beta * w, r = p.beta * l;
  const float e = p.label_smoothing, k = 1.0f - e;
  float loss = 0, dz = 0, dc = 0, dr = 0;
  bool has_z = true, has_sides = false;
  switch (kind) {
    case Preference::kSigmoid:
      loss = e == 0 ? -(k * P(z)) : -(k * P(z)) - e * P(-z);
      dz = e == 0 ? -(k * S(-z)) : e * S(z) - k * S(-z);
      break;
    case Preference::kHinge:
      loss = std::isnan(z) ? z : std::max(1.0f - z, 0.0f);
      dz = std::isnan(z) ? z : 1.0f - z > 0 ? -1.0f : 0.0f;
      break;
    case Preference::kIpo: {
      const float d = delta - p.half;
      return {d * d, 2 * d, -(2 * d)};
    }
    case Preference::kExoPair: {
      const float A = P(z) - p.log_keep, B = P(-z) - p.log_flip;
      loss = times(S(z), A) + times(S(-z), B);
      dz = times(S(z) * S(-z), A - B);
      break;
    }
    case Preference::kNcaPair:
      loss = (-P(c) - P(-c) / 2) - P(-r) / 2;
      dc = S(c) / 2 - S(-c);
      dr = S(r) / 2;
      has_z = false, has_sides = true;
      break;
    case Preference::kRobust:
      loss = (e == 0 ? -(k * P(z)) : -(k * P(z)) + e * P(-z)) / p.unflipped;
      dz = (e == 0 ? -(k * S(-z)) : -(k * S(-z)) - e * S(z)) / p.unflipped;
      break;
    case Preference::kBcoPair:
      loss = -P(c) - P(-r);
      dc = -S(-c);
      dr = S(r);
      has_z = false, has_sides = true;
      break;
    case Preference::kSppoHard: {
      const float a = w - p.half, b = l + p.half;
      return {a * a + b * b, 2 * a, 2 * b};
    }
    case Preference::kApoZero:
      loss = S(-c) + S(r);
      dc = -(S(c) * S(-c));
      dr = S(r) * S(-r);
      has_z = false, has_sides = true;
      break;
    case Preference::kApoDown: {
      const float of_c = S(c) * S(-c), of_z = -(S(z) * S(-z));
      return {S(c) + S(-z), p.beta * (of_c + of_z), p.beta * -of_z};
    }
    case Preference::kDiscopop: {
      const float q = z / p.tau, m = S(q), o = S(-q), E = z == -INFINITY ? 0.0f : rlk::exp(P(q) - z);
      loss = -times(P(z), o) + E;
      dz = (-(S(-z) * o) - E) + times(times(P(z), m) + E, o / p.tau);
      break;
    }
    case Preference::kOrpo: {
      if (chosen.empty || rejected.empty) return {0, 0, 0};
      const float u = -rlk::expm1(w), v = -rlk::expm1(l);
      if (u == 0 && v == 0) return {-(p.beta * P(0.0f)), 0, 0};
      const float odds_loss = -(p.beta * P((w - l) - (M(w) - M(l))));
      if (std::isnan(odds_loss)) return {odds_loss, odds_loss, odds_loss};
      const float g = p.beta / std::fma(rlk::exp(w - l), v, u);
      return {odds_loss, -g, times(g, u / v)};
    }
    case Preference::kKto:
      break;
  }
  if (has_sides && !has_z) return {loss, p.beta * dc, p.beta * dr};
  return {loss, p.beta * dz, -(p.beta * dz)};
}

float mean(const Floats& x) { return x.empty() ? 0.0f : (sum_test::tree(x) + 0.0f) / static_cast<float>(x.size()); }

std::vector<std::size_t> sorted(const Floats& keys) {
  std::vector<std::size_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (std::isnan(keys[b])) return !std::isnan(keys[a]);
    return keys[a] < keys[b];
  });
  return order;
}

struct Results {
  Floats losses, reward_w, reward_l, d_w, d_l, metrics;
  std::vector<std::int32_t> ranks;
};

Results reference(const PreferenceLossParams& p) {
  Results r;
  const auto num = static_cast<std::size_t>(p.chosen.num);
  std::vector<Element> w, l;
  for (std::int64_t i = 0; i < p.chosen.num; ++i) w.push_back(element(p, p.chosen, i));
  for (std::int64_t i = 0; i < p.rejected.num; ++i) l.push_back(element(p, p.rejected, i));
  for (const Element& e : w) r.reward_w.push_back(nan_of(e.reward));
  for (const Element& e : l) r.reward_l.push_back(nan_of(e.reward));
  r.d_w.resize(w.size());
  r.d_l.resize(l.size());
  if (p.kind == Preference::kKto) {
    const float kl = p.kl ? *p.kl : 0.0f, K = kl < 0 ? 0.0f : kl;
    for (std::size_t i = 0; i < w.size() + l.size(); ++i) {
      const bool second = i >= w.size();
      const Element& e = second ? l[i - w.size()] : w[i];
      const float v = p.beta * (second ? K - e.s : e.s - K), g = p.beta * (S(v) * S(-v));
      const float weight = second ? p.rejected_weight : p.chosen_weight;
      r.losses.push_back(S(-v) * weight);
      (second ? r.d_l[i - w.size()] : r.d_w[i]) = times(second ? g : -g, e.h) * weight;
    }
  } else if (p.sort != PreferenceSort::kNone) {
    Floats first, second;
    for (std::size_t i = 0; i < num; ++i) {
      const float pw = p.chosen.policy[i], pl = p.rejected.policy[i], fw = p.chosen.reference[i],
                  fl = p.rejected.reference[i];
      first.push_back(p.sort == PreferenceSort::kAot ? pw - pl : pw - fw);
      second.push_back(p.sort == PreferenceSort::kAot ? fw - fl : pl - fl);
    }
    const auto a = sorted(first), b = sorted(second);
    r.ranks.resize(2 * num);
    for (std::size_t k = 0; k < num; ++k) {
      r.ranks[a[k]] = r.ranks[num + b[k]] = static_cast<std::int32_t>(k);
      const Value v = value(p, Preference::kSigmoid, of_ratio(first[a[k]]), of_ratio(second[b[k]]));
      r.losses.push_back(v.loss);
      r.d_w[a[k]] = v.g_w;
      r.d_l[p.sort == PreferenceSort::kAot ? a[k] : b[k]] = v.g_l;
    }
  } else {
    for (std::size_t i = 0; i < num; ++i) {
      const Value v = value(p, p.kind, w[i], l[i]);
      float loss = v.loss, d_w = times(v.g_w, w[i].h), d_l = times(v.g_l, l[i].h);
      if (p.chosen.aligned) {
        const float weight = rlk::exp(w[i].aligned + l[i].aligned);
        loss = times(loss, weight);
        d_w = times(d_w, weight);
        d_l = times(d_l, weight);
      }
      if (p.nll_weight != 0) {
        const float policy = p.chosen.policy[static_cast<std::int64_t>(i) * p.chosen.policy_stride];
        loss -= p.nll_weight * (p.chosen.count ? policy / w[i].n : policy);
        d_w -= p.chosen.count ? p.nll_weight / w[i].n : p.nll_weight;
      }
      r.losses.push_back(loss);
      r.d_w[i] = d_w;
      r.d_l[i] = d_l;
    }
  }
  r.losses = canonical(r.losses);
  r.d_w = canonical(r.d_w);
  r.d_l = canonical(r.d_l);
  Floats margins, right;
  for (std::size_t i = 0; p.kind != Preference::kKto && i < num; ++i) {
    margins.push_back(r.reward_w[i] - r.reward_l[i]);
    right.push_back(r.reward_w[i] > r.reward_l[i] ? 1.0f : 0.0f);
  }
  r.metrics = {mean(r.losses), mean(r.reward_w), mean(r.reward_l), mean(margins), mean(right)};
  if (p.kind == Preference::kKto) {
    r.metrics[3] = r.metrics[1] - r.metrics[2];
    r.metrics[4] = NAN;
  }
  r.metrics = canonical(r.metrics);
  return r;
}

void check(PreferenceLossParams p, const std::string& text) {
  const Results want = reference(p);
  Floats dlosses;
  for (std::size_t i = 0; i < want.losses.size(); ++i) dlosses.push_back(0.25f * static_cast<float>(i) - 3.0f);
  for_each_backend([&](const std::string& backend) {
    const std::int64_t w = p.chosen.num, l = p.rejected.num;
    Bytes losses(static_cast<std::int64_t>(want.losses.size()) * 4), reward_w(w * 4), reward_l(l * 4), d_w(w * 4),
        d_l(l * 4), metrics(20), ranks(8 * w), order(8 * w), to_w(w * 4), to_l(l * 4);
    p.losses = losses.as<float>();
    p.chosen.reward = reward_w.as<float>();
    p.rejected.reward = reward_l.as<float>();
    p.chosen.d_policy = d_w.as<float>();
    p.rejected.d_policy = d_l.as<float>();
    p.metrics = metrics.as<float>();
    p.ranks = ranks.as<std::int32_t>();
    p.order = order.as<std::int32_t>();
    run(p);
    ASSERT_NO_FATAL_FAILURE(losses.expect(bytes_of(want.losses), text + ", losses, " + backend));
    ASSERT_NO_FATAL_FAILURE(reward_w.expect(bytes_of(want.reward_w), text + ", chosen rewards, " + backend));
    ASSERT_NO_FATAL_FAILURE(reward_l.expect(bytes_of(want.reward_l), text + ", rejected rewards, " + backend));
    ASSERT_NO_FATAL_FAILURE(d_w.expect(bytes_of(want.d_w), text + ", d_chosen, " + backend));
    ASSERT_NO_FATAL_FAILURE(d_l.expect(bytes_of(want.d_l), text + ", d_rejected, " + backend));
    ASSERT_NO_FATAL_FAILURE(metrics.expect(bytes_of(want.metrics), text + ", metrics, " + backend));
    PreferenceLossBackwardParams q;
    q.dlosses = dlosses.data();
    q.num_losses = static_cast<std::int64_t>(dlosses.size());
    q.chosen = {p.chosen.d_policy, nullptr, 0, w, to_w.as<float>()};
    q.rejected = {p.rejected.d_policy, nullptr, p.kind == Preference::kKto ? w : 0, l, to_l.as<float>()};
    Floats g_w, g_l;
    const bool sorts = p.sort != PreferenceSort::kNone, unpaired = p.sort == PreferenceSort::kAotUnpaired;
    if (sorts) {
      ASSERT_NO_FATAL_FAILURE(ranks.expect(bytes_of(want.ranks), text + ", ranks, " + backend));
      q.chosen.rank = p.ranks;
      q.rejected.rank = p.ranks + (unpaired ? w : 0);
    }
    const auto loss_of = [&](std::size_t i, bool second) {
      if (!sorts) return i + (second && p.kind == Preference::kKto ? static_cast<std::size_t>(w) : 0);
      return static_cast<std::size_t>(want.ranks[i + (second && unpaired ? static_cast<std::size_t>(w) : 0)]);
    };
    for (std::size_t i = 0; i < want.d_w.size(); ++i) g_w.push_back(nan_of(dlosses[loss_of(i, false)] * want.d_w[i]));
    for (std::size_t i = 0; i < want.d_l.size(); ++i) g_l.push_back(nan_of(dlosses[loss_of(i, true)] * want.d_l[i]));
    run(q);
    ASSERT_NO_FATAL_FAILURE(to_w.expect(bytes_of(g_w), text + ", gradient of chosen, " + backend));
    ASSERT_NO_FATAL_FAILURE(to_l.expect(bytes_of(g_l), text + ", gradient of rejected, " + backend));
  });
}

// Log-probabilities of sequences around -30, a few extreme.
Floats logprobs(std::int64_t num, unsigned seed, bool special) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(-30.0f, 9.0f);
  Floats x;
  for (std::int64_t i = 0; i < num; ++i) {
    constexpr float kValues[] = {0.0f, -0.0f, -1e-6f, -1e4f, -1e30f, -INFINITY, NAN, -0.6931471f, -0.6931472f};
    x.push_back(special && random() % 5 == 0 ? kValues[random() % 9] : std::min(normal(random), -0.01f));
  }
  return x;
}

class PreferenceLoss : public linear_test::Linear {};

TEST_F(PreferenceLoss, EveryKindAndOptionHasTheBitsOfTheContract) {
  unsigned seed = 0;
  for (int kind = 0; kind <= static_cast<int>(Preference::kKto); ++kind) {
    // Pairs: no pair; one pair; more than a block of threads; more than the eight per lane of a chunk.
    for (const std::int64_t num : {0, 1, 300, 2500}) {
      for (int option = 0; option < (num == 300 ? 12 : 1); ++option) {
        ++seed;
        PreferenceLossParams p;
        p.kind = static_cast<Preference>(kind);
        const bool pairs = p.kind != Preference::kKto, special = option % 2 == 1;
        const std::int64_t other = pairs ? num : num / 2;
        const Floats pw = logprobs(num, 7 * seed, special), pl = logprobs(2 * other, 7 * seed + 1, special);
        const Floats fw = logprobs(num, 7 * seed + 2, special), fl = logprobs(other, 7 * seed + 3, special);
        const Floats aw = logprobs(num, 7 * seed + 4, false), al = logprobs(other, 7 * seed + 5, false);
        std::vector<std::int64_t> nw, nl;
        for (std::int64_t i = 0; i < num; ++i) nw.push_back(i % 40);
        for (std::int64_t i = 0; i < other; ++i) nl.push_back(i % 31);
        const float kl = option == 3 ? -1.0f : option == 5 ? NAN : 0.7f;
        p.chosen.policy = pw.data();
        p.rejected.policy = pl.data();
        p.rejected.policy_stride = 2;
        p.chosen.num = num;
        p.rejected.num = other;
        if (option % 3 != 2 && p.kind != Preference::kOrpo) {
          p.chosen.reference = fw.data();
          p.rejected.reference = fl.data();
        }
        if (option >= 4) {
          p.chosen.count = nw.data();
          p.rejected.count = nl.data();
          p.average = static_cast<PreferenceAverage>(option % 3);
        }
        if (pairs && option >= 6) {
          p.nll_weight = 0.5f;
          p.chosen.aligned = option >= 8 ? aw.data() : nullptr;
          p.rejected.aligned = option >= 8 ? al.data() : nullptr;
        }
        p.kl = &kl;
        p.beta = option % 2 ? 0.1f : 2.5f;
        p.half = 1.0f / (2 * p.beta);
        p.label_smoothing = option % 4 == 0 && p.kind != Preference::kExoPair ? 0.0f : 0.2f;
        p.log_keep = -0.22314355f;
        p.log_flip = -1.6094379f;
        p.unflipped = 1 - 2 * p.label_smoothing;
        p.margin = option == 7 ? 0.3f : 0.0f;
        p.score = static_cast<PreferenceScore>(option % 5);
        p.alpha = 0.5f;
        p.chosen_weight = 1.33f;
        ASSERT_NO_FATAL_FAILURE(check(
            p, "kind " + std::to_string(kind) + ", option " + std::to_string(option) + ", num " + std::to_string(num)));
      }
    }
  }
}

TEST_F(PreferenceLoss, SortedLossesHaveTheBitsOfTheContract) {
  for (const PreferenceSort sort : {PreferenceSort::kAot, PreferenceSort::kAotUnpaired}) {
    for (const std::int64_t num : {0, 1, 2, 600}) {
      for (const bool special : {false, true}) {
        const Floats pw = logprobs(num, 1, special), pl = logprobs(num, 2, special), fw = logprobs(num, 3, special),
                     fl = logprobs(num, 4, special);
        PreferenceLossParams p;
        p.sort = sort;
        p.chosen.policy = pw.data();
        p.rejected.policy = pl.data();
        p.chosen.reference = fw.data();
        p.rejected.reference = fl.data();
        p.chosen.num = p.rejected.num = num;
        p.label_smoothing = special ? 0.1f : 0.0f;
        ASSERT_NO_FATAL_FAILURE(
            check(p, "sort " + std::to_string(static_cast<int>(sort)) + ", num " + std::to_string(num)));
      }
    }
  }
}

}  // namespace
}  // namespace sequence_test
