// A second implementation of policy_loss, simple and slow, written from the contract, ops/policy_loss.h. The reference
// shares only the elementary functions with the backends; tests/cpp/test_math.cpp tests these.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "rlk/math/exp.h"
#include "rlk/math/expm1.h"
#include "rlk/math/log2.h"
#include "rlk/math/sigmoid.h"
#include "rlk/ops/policy_loss.h"
#include "token_reference.h"

namespace policy_test {

using rlk::DType;
using rlk::PolicyLossParams;
using rlk::PolicySpec;

struct Results {
  float loss = 0.0f;
  std::vector<float> metrics = std::vector<float>(rlk::kPolicyMetrics), d_logprob, d_entropy;
};

class Reference {
 public:
  explicit Reference(const PolicyLossParams& p) : p_(p), s_(p.spec) {}

  Results run() {
    const auto& q = p_.sequences;
    Results r;
    r.d_logprob.assign(static_cast<std::size_t>(q.num_slots()), 0.0f);
    r.d_entropy = r.d_logprob;
    std::int64_t nonempty = 0;
    for (std::int64_t s = 0; s < q.num_sequences; ++s) {
      const std::int64_t n = count(s);
      tokens_ += n;
      nonempty += n > 0;
    }
    sequences_ = nonempty;
    float d = 1.0f;
    if (s_.denominator == rlk::DenominatorKind::kTokens) d = static_cast<float>(tokens_);
    if (s_.denominator == rlk::DenominatorKind::kSequences) d = static_cast<float>(q.num_sequences);
    if (s_.denominator == rlk::DenominatorKind::kSequencesWithTokens) d = static_cast<float>(nonempty);
    if (p_.denominator_value != 0.0f) d = p_.denominator_value;
    if (p_.denominator != nullptr) d = *p_.denominator;
    share_ = over(s_.scale, d);
    if (s_.horizon != 0.0f) share_ = share_ / s_.horizon;
    for (std::int64_t s = 0; s < q.num_sequences; ++s) sequence(s, &r);
    float* m = r.metrics.data();
    const float policy = tree(weighted_[0]), kl = tree(weighted_[1]), entropy = tree(weighted_[2]);
    const float n = static_cast<float>(tokens_);
    float loss = policy;
    if (s_.kl != rlk::KlEstimator::kNone && s_.kl_coef != 0.0f) loss = std::fma(s_.kl_coef, kl, loss);
    if (p_.entropy.data != nullptr && s_.entropy_coef != 0.0f) loss = std::fma(-s_.entropy_coef, entropy, loss);
    r.loss = m[0] = written(loss);
    m[rlk::kPolicyMetricPolicyLoss] = written(policy);
    m[rlk::kPolicyMetricKlLoss] = written(kl);
    m[rlk::kPolicyMetricEntropyLoss] = written(entropy);
    m[rlk::kPolicyMetricNumTokens] = n;
    m[rlk::kPolicyMetricNumSequences] = static_cast<float>(nonempty);
    m[rlk::kPolicyMetricDenominator] = written(d);
    m[rlk::kPolicyMetricPolicySum] = written(tree(sums_[0]));
    m[rlk::kPolicyMetricKlSum] = written(tree(sums_[1]));
    m[rlk::kPolicyMetricEntropySum] = written(tree(sums_[2]));
    for (int i = 0; i < 4; ++i) m[rlk::kPolicyMetricClipFraction + i] = over(static_cast<float>(counts_[i]), n);
    m[rlk::kPolicyMetricPpoKl] = written(over(tree(sums_[3]), n));
    m[rlk::kPolicyMetricKl] = written(over(tree(sums_[1]), n));
    m[rlk::kPolicyMetricEntropy] = written(over(tree(sums_[2]), n));
    m[rlk::kPolicyMetricRatioMean] = written(over(tree(sums_[4]), n));
    m[rlk::kPolicyMetricRatioMax] = written(ratio_max_);
    const float w = tree(sums_[5]);
    m[rlk::kPolicyMetricImportanceMean] = written(over(w, n));
    m[rlk::kPolicyMetricImportanceMax] = written(importance_max_);
    m[rlk::kPolicyMetricImportanceClipFraction] = over(static_cast<float>(counts_[4]), n);
    m[rlk::kPolicyMetricImportanceEss] = written(over(over(w * w, tree(sums_[6])), n));
    m[rlk::kPolicyMetricMismatchMean] = written(over(tree(sums_[7]), n));
    m[rlk::kPolicyMetricMismatchMax] = written(mismatch_max_);
    return r;
  }

 private:
  struct Token {
    bool counts = false;
    float l = 0, o = 0, a = 0, f = 0, m = 0, h = 0, chosen = 0, u = 1;
  };

  std::int64_t begin(std::int64_t s) const { return p_.sequences.packed() ? cut(s) : 0; }
  std::int64_t cut(std::int64_t i) const {
    if (p_.sequences.cu_dtype == DType::kInt64) return static_cast<const std::int64_t*>(p_.sequences.cu_seqlens)[i];
    return static_cast<const std::int32_t*>(p_.sequences.cu_seqlens)[i];
  }
  std::int64_t length(std::int64_t s) const {
    return p_.sequences.packed() ? cut(s + 1) - cut(s) : p_.sequences.num_tokens;
  }
  bool counts(std::int64_t s, std::int64_t t) const {
    const std::int64_t i = p_.sequences.packed() ? begin(s) + t : s * p_.mask.row_stride + t;
    return is_set(p_.mask, i);
  }
  std::int64_t count(std::int64_t s) const {
    std::int64_t n = 0;
    for (std::int64_t t = 0; t < length(s); ++t) n += counts(s, t);
    return n;
  }
  float value(const rlk::PolicyTokens& a, std::int64_t s, std::int64_t t, float otherwise) const {
    if (a.data == nullptr) return otherwise;
    if (a.token_stride == 0) return a.data[s * a.sequence_stride];
    return a.data[p_.sequences.packed() ? begin(s) + t : s * a.sequence_stride + t];
  }

  float importance(float d, bool* clipped) const {
    const float e = rlk::exp(limited(d, -s_.importance_limit, s_.importance_limit));
    const bool out = outside(e, s_.importance_low, s_.importance_high);
    *clipped = s_.importance_mask ? out && !(e == 0.0f) : out;
    if (s_.importance_mask) return out ? 0.0f : e;
    return limited(e, s_.importance_low, s_.importance_high);
  }
  float gamma(float k, float lambda, float x, float r) const {
    const float w = rlk::exp((lambda + k * x) - lambda * r);
    return std::isinf(w) ? 0.0f : w;
  }

  void sequence(std::int64_t s, Results* r) {
    const std::int64_t length_of = length(s), n = count(s);
    const float tokens = static_cast<float>(n);
    std::vector<Token> all(static_cast<std::size_t>(length_of));
    for (std::int64_t t = 0; t < length_of; ++t) {
      Token& x = all[static_cast<std::size_t>(t)];
      if (!counts(s, t)) continue;
      x.counts = true;
      x.l = value(p_.logprob, s, t, 0);
      x.o = value(p_.old_logprob, s, t, x.l);
      x.a = value(p_.advantage, s, t, 0);
      x.f = value(p_.ref_logprob, s, t, 0);
      x.m = value(p_.importance, s, t, 0);
      x.h = value(p_.entropy, s, t, 0);
      x.chosen = value(p_.selected, s, t, 0);
      x.u = value(p_.token_weight, s, t, 1);
    }
    const auto over_tokens = [&](const auto& term) {
      std::vector<float> leaves;
      for (const Token& x : all) leaves.push_back(x.counts ? term(x) : 0.0f);
      return tree(leaves);
    };
    float weight = share_;
    if (s_.sequence_mean) weight = over(weight, tokens);
    const float entropy_weight = s_.entropy_token_mean ? over(s_.entropy_scale, static_cast<float>(tokens_)) : weight;
    const bool rollout = p_.importance.data != nullptr && s_.importance != rlk::ImportanceLevel::kGiven;
    const auto drift = [&](const Token& x) { return (s_.importance_of_current ? x.l : x.o) - x.m; };
    const auto token_weight = [&](const Token& x, bool* clipped) {
      *clipped = false;
      if (s_.importance == rlk::ImportanceLevel::kGiven) return x.m;
      return s_.importance == rlk::ImportanceLevel::kToken ? importance(drift(x), clipped) : 1.0f;
    };
    const auto chosen = [&](const Token& x) { return p_.selected.data != nullptr && (x.chosen < 0 || x.chosen > 0); };
    const auto drops = [&](const Token& x) { return s_.selected_drops != 0 && chosen(x); };
    bool ignored = false;
    // Values that the tokens of a sequence share.
    float of_sequence = 1.0f, ratio = 1.0f, slope = 0.0f, shared = 0.0f, gamma_up = 0.0f, gamma_down = 0.0f,
          mean_a = 0.0f, log_of_sequence = 0.0f, weighted_ratio = 1.0f, kl_sum = 0.0f;
    bool of_sequence_clipped = false, gated = false, dropped = false;
    const bool has_weights = s_.importance != rlk::ImportanceLevel::kNone;
    if (n > 0) {
      const float sum_drift = rollout ? over_tokens(drift) : 0.0f;
      if (s_.importance == rlk::ImportanceLevel::kSequence) of_sequence = importance(sum_drift, &of_sequence_clipped);
      if (s_.importance == rlk::ImportanceLevel::kGeometric) {
        of_sequence = importance(sum_drift / tokens, &of_sequence_clipped);
      }
      if (s_.gate) {
        const float drift_ratio = rlk::exp(sum_drift / tokens);
        gated = !(drift_ratio >= s_.gate_low && drift_ratio <= s_.gate_high);
      }
      if (s_.drop_above < kInf) {
        dropped = !(over_tokens([&](const Token& x) { return (s_.drop_by_rollout ? x.m : x.o) - x.l; }) / tokens <=
                    s_.drop_above);
      }
      if (s_.level != rlk::RatioLevel::kToken) {
        float x = over_tokens([&](const Token& k) {
          const float d = k.l - k.o;
          if (s_.surrogate == rlk::Surrogate::kGamma) return limited(d, -20.0f, 20.0f);
          if (s_.surrogate != rlk::Surrogate::kGeometricClip) return d;
          if (k.a > 0) return d > s_.clip_high ? s_.clip_high : d;
          if (k.a < 0) return d < s_.clip_low ? s_.clip_low : d;
          if (k.a != 0) return d;  // true for NaN
          return 0.0f;
        });
        if (s_.level == rlk::RatioLevel::kGeometric) x = x / tokens;
        if (s_.surrogate == rlk::Surrogate::kGamma) {
          constexpr float kLeast = -18.42068099975586f;
          if (has_weights) {
            x = x + over_tokens([&](const Token& k) {
                  return limited(rlk::log2(token_weight(k, &ignored)) * rlk::kLn2, kLeast, 20.0f);
                });
          }
          x = limited(x, kLeast, 20.0f);
          ratio = rlk::exp(x);
          gamma_up = gamma(s_.k_positive, s_.lambda_positive, x, ratio);
          gamma_down = gamma(s_.k_negative, s_.lambda_negative, x, ratio);
        } else {
          log_of_sequence = limited(x, s_.log_ratio_min, s_.log_ratio_max);
          ratio = weighted_ratio = rlk::exp(log_of_sequence);
          slope = outside(x, s_.log_ratio_min, s_.log_ratio_max) ? 0.0f : ratio;
        }
        if (s_.surrogate == rlk::Surrogate::kGeometricClip) {
          mean_a = over_tokens([&](const Token& k) { return k.a; }) / tokens;
          if (has_weights) {
            weighted_ratio =
                rlk::exp(log_of_sequence + over_tokens([&](const Token& k) {
                                             return rlk::log2(token_weight(k, &ignored) + 1e-10f) * rlk::kLn2;
                                           }) / tokens);
          }
        } else if (!s_.straight_through) {
          if (s_.surrogate == rlk::Surrogate::kRatio || s_.surrogate == rlk::Surrogate::kSigmoid) {
            const float up = over_tokens([&](const Token& k) {
              return !(k.a <= 0) && !drops(k) ? by_weight(times(k.a, token_weight(k, &ignored)), k) : 0.0f;
            });
            const float down = over_tokens([&](const Token& k) {
              return k.a < 0 && !drops(k) ? by_weight(times(k.a, token_weight(k, &ignored)), k) : 0.0f;
            });
            const float of_up = up == 0.0f ? 0.0f : times(up, term(1.0f, 0, 0, ratio, slope).along_ratio);
            const float of_down =
                dropped || down == 0.0f ? 0.0f : times(down, -term(-1.0f, 0, 0, ratio, slope).along_ratio);
            shared = gated ? 0.0f : times(of_sequence, of_up + of_down);
          }
          if (s_.kl != rlk::KlEstimator::kNone && s_.kl_times_ratio == rlk::kTimesRatio) {
            kl_sum = over_tokens([&](const Token& x2) { return by_weight(kl(x2, 80.0f).first, x2); });
          }
          if (s_.level == rlk::RatioLevel::kGeometric) shared = shared / tokens;
        }
      }
    }
    const bool shares =
        s_.level != rlk::RatioLevel::kToken && !s_.straight_through && s_.surrogate != rlk::Surrogate::kGeometricClip;
    std::vector<float> leaves[8];
    for (std::int64_t t = 0; t < length_of; ++t) {
      const Token& x = all[static_cast<std::size_t>(t)];
      if (!x.counts) {
        for (auto& l : leaves) l.push_back(0.0f);
        continue;
      }
      const float d = x.l - x.o;
      float log_ratio = x.o - x.l, r1 = ratio, slope1 = slope;
      if (s_.level == rlk::RatioLevel::kToken) {
        const float limit = limited(d, s_.log_ratio_min, s_.log_ratio_max);
        log_ratio = -limit;
        r1 = rlk::exp(limit);
        slope1 = outside(d, s_.log_ratio_min, s_.log_ratio_max) ? 0.0f : r1;
      }
      Term p;
      if (s_.surrogate == rlk::Surrogate::kGeometricClip) {
        p.value = times(-mean_a, weighted_ratio);
        const bool above = x.a > 0 && d > s_.clip_high, below = x.a < 0 && d < s_.clip_low;
        p.along_logprob = above || below || x.a == 0 ? 0.0f : p.value;
        p.clipped = above;
        p.dual = below;
      } else if (s_.surrogate == rlk::Surrogate::kGamma) {
        p.along_logprob = times(-(x.a >= 0 ? gamma_up : gamma_down), x.a);
        p.value = times(p.along_logprob, x.l);
      } else {
        p = term(x.a, x.l, d, r1, slope1);
      }
      bool w_clipped = false;
      float w = token_weight(x, &w_clipped);
      if (has_weights && rollout && s_.importance != rlk::ImportanceLevel::kToken) {
        w = of_sequence;
        w_clipped = of_sequence_clipped;
      }
      if (!has_weights) w = of_sequence;
      if (has_weights && s_.surrogate != rlk::Surrogate::kGamma && s_.surrogate != rlk::Surrogate::kGeometricClip) {
        p.value = times(p.value, w);
        p.along_ratio = times(p.along_ratio, w);
        p.along_logprob = times(p.along_logprob, w);
      }
      const bool none =
          gated || (dropped && x.a < 0) || drops(x) || (x.a == 0 && s_.surrogate != rlk::Surrogate::kGeometricClip);
      if (none) p.value = p.along_ratio = p.along_logprob = 0.0f;
      if (chosen(x) && s_.selected_drops == 0) {
        const float c = s_.selected_kl * w;
        p.value = sum_or_first(p.value, times(c, std::fabs(d)));
        p.along_logprob = p.along_logprob + (d > 0 ? c : d < 0 ? -c : 0.0f);
      }
      if (p_.token_weight.data != nullptr) {
        p.value = times(p.value, x.u);
        p.along_ratio = times(p.along_ratio, x.u);
        p.along_logprob = times(p.along_logprob, x.u);
      }
      float gradient = shares ? p.along_logprob + shared : p.along_ratio + p.along_logprob, k = 0.0f;
      if (s_.kl != rlk::KlEstimator::kNone) {
        auto [value_of, along] = kl(x, s_.kl_times_ratio ? 80.0f : kLargest);
        float others = 0.0f;
        if (s_.kl_times_ratio == rlk::kTimesOwnRatio) {
          std::tie(value_of, along) = kl_times_ratio(x, value_of, along, d, true, rlk::exp(d), 1.0f);
        } else if (s_.kl_times_ratio) {
          const bool of_token = s_.level == rlk::RatioLevel::kToken;
          float share = outside(slope1, r1, r1) ? 0.0f : 1.0f;
          if (shares && share != 0.0f && s_.level == rlk::RatioLevel::kGeometric) share = 1.0f / tokens;
          const float own = by_weight(value_of, x);  // if infinite, it alone decides this token's slope
          if (shares && !std::isinf(own)) others = times(share * r1, kl_sum - own);
          std::tie(value_of, along) =
              kl_times_ratio(x, value_of, along, of_token ? -log_ratio : log_of_sequence, of_token, r1, share);
        }
        if (s_.kl_gradient_ratio > 0.0f) along = times(along, cut_at(r1, s_.kl_gradient_ratio));
        if (outside(value_of, -s_.kl_limit, s_.kl_limit) && !s_.kl_straight_through) along = 0.0f;
        k = by_weight(limited(value_of, -s_.kl_limit, s_.kl_limit), x);
        along = by_weight(along, x) + others;
        if (s_.kl_coef != 0.0f) gradient = std::fma(s_.kl_coef, along, gradient);
      }
      const auto slot = static_cast<std::size_t>(p_.sequences.packed() ? begin(s) + t : s * length_of + t);
      const float g = weighted(weight, gradient);
      r->d_logprob[slot] = std::isnan(g) ? rlk::canonical_nan() : g;
      r->d_entropy[slot] = by_weight(weighted(entropy_weight, -s_.entropy_coef), x);
      if (std::isnan(r->d_entropy[slot])) r->d_entropy[slot] = rlk::canonical_nan();
      const float mismatch = rollout ? std::fabs(x.o - x.m) : 0.0f;
      const float found[] = {p.value, k,       p_.entropy.data != nullptr ? by_weight(x.h, x) : 0.0f, log_ratio, r1, w,
                             w * w,   mismatch};
      for (int i = 0; i < 8; ++i) leaves[i].push_back(found[i]);
      if (!std::isnan(ratio_max_) && !(ratio_max_ > r1)) ratio_max_ = r1;
      const float weight_or_zero = w < 0.0f ? 0.0f : w;
      if (!std::isnan(importance_max_) && !(importance_max_ > weight_or_zero)) importance_max_ = weight_or_zero;
      if (!std::isnan(mismatch_max_) && !(mismatch_max_ > mismatch)) mismatch_max_ = mismatch;
      counts_[0] += s_.selected_drops == rlk::kDropsAsClipped ? chosen(x) : p.clipped;
      counts_[1] += p.dual;
      counts_[2] += r1 < s_.clip_low && x.a < 0;
      counts_[3] += r1 > s_.clip_high && x.a > 0;
      counts_[4] += w_clipped;
    }
    float sum[8];
    for (int i = 0; i < 8; ++i) {
      sum[i] = tree(leaves[i]);
      sums_[i].push_back(sum[i]);
    }
    weighted_[0].push_back(weighted(weight, sum[0]));
    weighted_[1].push_back(weighted(weight, sum[1]));
    weighted_[2].push_back(weighted(entropy_weight, sum[2]));
  }

  struct Term {
    float value = 0.0f, along_ratio = 0.0f, along_logprob = 0.0f;
    bool clipped = false, dual = false;
  };
  float by_weight(float value, const Token& x) const {
    return p_.token_weight.data != nullptr ? times(value, x.u) : value;
  }
  // The part of the term that does not need the sequence.
  Term term(float a, float l, float d, float r, float slope) const {
    Term t;
    switch (s_.surrogate) {
      case rlk::Surrogate::kRatio: {
        const float p1 = times(-a, s_.ratio_cap < r ? s_.ratio_cap : r);
        const float p2 = times(-a, limited(r, s_.clip_low, s_.clip_high));
        t.clipped = p2 > p1;
        t.value = t.clipped ? p2 : p1;
        float e = r > s_.ratio_cap ? 0.0f : slope;
        if (t.clipped) e = outside(r, s_.clip_low, s_.clip_high) ? 0.0f : slope;
        if (a < 0 && t.value > -a * s_.dual_clip) {
          t.dual = true;
          t.value = -a * s_.dual_clip;
          e = 0.0f;
        }
        t.along_ratio = times(-a, e);
        break;
      }
      case rlk::Surrogate::kWeighted:
      case rlk::Surrogate::kLogprob: {
        const bool clips = s_.surrogate == rlk::Surrogate::kWeighted;
        const float w = clips ? limited(r, s_.clip_low, s_.clip_high) : 1.0f;
        t.clipped = clips && outside(r, s_.clip_low, s_.clip_high);
        t.along_logprob = times(-w, a);
        t.value = times(t.along_logprob, l);
        break;
      }
      case rlk::Surrogate::kSigmoid: {
        const float tau = a > 0 ? s_.tau_positive : s_.tau_negative, g = rlk::sigmoid(tau * (r - 1.0f));
        const float bump = (4.0f * g) * rlk::sigmoid(-(tau * (r - 1.0f)));
        t.value = times(-(g * (4.0f / tau)), a);
        t.along_ratio = times(-a, bump == 0.0f ? 0.0f : bump * slope);
        break;
      }
      default:
        t.value = sum_or_first((0.5f * s_.quadratic * d) * d, -times(l, a));
        t.along_logprob = -(a - s_.quadratic * d);
    }
    return t;
  }
  std::pair<float, float> kl(const Token& x, float most) const {
    const float raw = x.f - x.l, e = limited(raw, -s_.kl_input_limit, s_.kl_input_limit);
    float value = -e, along = 1.0f;
    if (s_.kl == rlk::KlEstimator::kK2) {
      value = (0.5f * e) * e;
      along = -e;
    } else if (s_.kl == rlk::KlEstimator::kK3) {
      value = rlk::expm1(cut_at(e, most)) - cut_at(e, most);
      along = -rlk::expm1(cut_at(e, most));
    } else if (s_.kl == rlk::KlEstimator::kAbs) {
      value = std::fabs(e);
      along = e > 0 ? -1.0f : e < 0 ? 1.0f : e == 0 ? 0.0f : e;
    }
    if (outside(raw, -s_.kl_input_limit, s_.kl_input_limit)) along = 0.0f;
    if (s_.kl_straight_through) along = -raw;
    return {value, along};
  }
  // K and its slope times a ratio r = exp(log). The token has a share in the ratio's slope.
  std::pair<float, float> kl_times_ratio(const Token& x, float value, float along, float log, bool of_token, float r,
                                         float share) const {
    if (s_.kl != rlk::KlEstimator::kK3 || s_.kl_straight_through) {
      return {times(value, r), times(share * cut_at(value, kLargest) + along, r)};
    }
    value = times(value, r);
    along = times(along, r);
    const float raw = x.f - x.l, e = limited(raw, -s_.kl_input_limit, s_.kl_input_limit);
    const bool held = outside(raw, -s_.kl_input_limit, s_.kl_input_limit);
    if (e > 16.0f) {
      float sum = log == -kInf ? log : log + e;
      if (!held && of_token && log == x.l - x.o) sum = x.f - x.o;
      const float product = rlk::exp(sum);
      value = product - cut_at(times(r, 1.0f + e), kLargest);
      if (!held) along = cut_at(r, kLargest) - product;
    }
    if (held || share == 0.0f) return {value, times(share, value) + along};
    return {value, -times(e, r) - times(1.0f - share, value)};
  }

  const PolicyLossParams& p_;
  const PolicySpec& s_;
  std::int64_t tokens_ = 0, sequences_ = 0, counts_[5] = {};
  float share_ = 0.0f, ratio_max_ = 0.0f, mismatch_max_ = 0.0f, importance_max_ = 0.0f;
  std::vector<float> weighted_[3], sums_[8];
};

}  // namespace policy_test
