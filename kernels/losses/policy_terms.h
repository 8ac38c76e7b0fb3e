// The formulas of ops/policy_loss.h that every backend shares.
#pragma once

#include "kernels/losses/importance_terms.h"
#include "kernels/losses/kl_terms.h"
#include "kernels/tokens/terms.h"
#include "kernels/tokens/weights.h"
#include "rlk/math/exp.h"
#include "rlk/math/log2.h"
#include "rlk/math/sigmoid.h"
#include "rlk/ops/policy_loss.h"

namespace rlk {

constexpr float kGammaLeast = -0x1.26bb1cp+4f;  // fl(ln 1e-8)
constexpr float kGammaLimit = 20.0f;
constexpr float kLeastWeight = 1e-10f;

enum PolicyInput : int {
  kInputLogprob,
  kInputOldLogprob,
  kInputAdvantage,
  kInputRefLogprob,
  kInputImportance,
  kInputEntropy,
  kInputSelected,
  kInputTokenWeight,
  kPolicyInputs
};
enum PolicySum : int {
  kSumPolicy,
  kSumKl,
  kSumPpoKl,
  kSumRatio,
  kSumEntropy,
  kSumImportance,
  kSumImportanceSquared,
  kSumMismatch,
  kPolicySums
};
constexpr int kPolicyMaxima = 3;
enum PolicyCount : int { kCountClipped = kCountTokens + 1, kCountDual, kCountLow, kCountHigh, kCountImportance };
// The sums of the first pass. The first pass runs only if a token's policy term needs sums over its sequence.
enum PolicyStatistic : int {
  kStatLogRatio,
  kStatMismatch,
  kStatDrop,
  // kStatPositive, kStatNegative: sums of advantage times importance weight, over tokens with an advantage of that sign
  kStatPositive,
  kStatNegative,
  kStatKl,
  kStatAdvantage,
  kStatLogImportance,
  kPolicyStatistics
};
static_assert(static_cast<int>(kPolicySums) == static_cast<int>(kPolicyStatistics));

RLK_HD PolicyTokens policy_input(const PolicyLossParams& p, int i) {
  switch (i) {
    case kInputLogprob:
      return p.logprob;
    case kInputOldLogprob: {  // without old_logprob the ratio is 1
      PolicyTokens a = p.logprob;
      if (p.old_logprob.data != nullptr) a = p.old_logprob;
      return a;
    }
    case kInputAdvantage:
      return p.advantage;
    case kInputRefLogprob:
      return p.ref_logprob;
    case kInputImportance:
      return p.importance;
    case kInputEntropy:
      return p.entropy;
    case kInputSelected:
      return p.selected;
    default:
      return p.token_weight;
  }
}

RLK_HD bool has_importance(const PolicySpec& s) { return s.importance != ImportanceLevel::kNone; }
// Whether `importance` holds log-probabilities.
RLK_HD bool has_rollout(const PolicyLossParams& p) {
  return p.importance.data != nullptr && p.spec.importance != ImportanceLevel::kGiven;
}
RLK_HD bool importance_of_token(const PolicySpec& s) {
  return s.importance == ImportanceLevel::kToken || s.importance == ImportanceLevel::kGiven;
}
RLK_HD bool importance_of_sequence(const PolicySpec& s) {
  return s.importance == ImportanceLevel::kSequence || s.importance == ImportanceLevel::kGeometric;
}
RLK_HD bool drops(const PolicySpec& s) { return s.drop_above < infinity(); }
// Whether the ratio depends on every token of a sequence, so that its gradient is a sum over the sequence.
RLK_HD bool has_shared_slope(const PolicySpec& s) {
  return s.level != RatioLevel::kToken && s.straight_through == 0 && s.surrogate != Surrogate::kGeometricClip;
}
// needs_statistics: whether a first pass over tokens must sum log-probabilities. needs_counts: whether any first pass
// is needed, even one that only counts tokens.
RLK_HD bool needs_statistics(const PolicySpec& s) {
  return s.level != RatioLevel::kToken || importance_of_sequence(s) || s.gate != 0 || drops(s);
}
RLK_HD bool needs_totals(const PolicyLossParams& p) {
  return counts_denominator(p) || (p.spec.entropy_token_mean != 0 && p.entropy.data != nullptr);
}
RLK_HD bool needs_counts(const PolicyLossParams& p) {
  return needs_statistics(p.spec) || p.spec.sequence_mean != 0 || needs_totals(p);
}

template <class F>
RLK_HD F log_of(F x) {
  return mul_rn(log2(x), broadcast<F>(kLn2));
}

// ---- importance weights ---------------------------------------------------------------------------------------------

RLK_HD ImportanceBounds importance_bounds(const PolicySpec& s) {
  return {s.importance_low, s.importance_high, s.importance_limit, s.importance_mask != 0};
}

// ---- factors that a sequence's tokens share -----------------------------------------------------------------------

struct PolicyFactors {
  std::int64_t tokens = 0;
  float weight = 0.0f, entropy_weight = 0.0f;  // the weight of each token in the loss; the weight of its entropy
  float log_ratio = 0.0f;                      // the sequence's log-ratio x
  float ratio = 1.0f, slope = 0.0f;            // the sequence's ratio r, and its derivative r'
  // sum of K (the KL estimates); derivative of the ratio's log with respect to each token's logprob
  float kl_sum = 0.0f, kl_share = 1.0f;
  float gradient = 0.0f;    // the gradient that all tokens of the sequence share
  float importance = 1.0f;  // the sequence's importance weight
  std::int32_t importance_clipped = 0, gated = 0, dropped = 0;
  float value = 0.0f;  // for kGeometricClip: the policy term P of each token
  // for kGamma: the weights w for a positive and a negative advantage
  float gamma_positive = 0.0f, gamma_negative = 0.0f;
};

// Weights of the tokens of a sequence with `n` tokens.
RLK_HD void set_weights(const PolicyLossParams& p, const PolicyTotals& totals, std::int64_t n, PolicyFactors* f) {
  const PolicySpec& s = p.spec;
  f->weight = token_weight(p, totals, n);
  f->entropy_weight =
      s.entropy_token_mean != 0 ? quotient_or_zero(s.entropy_scale, static_cast<float>(totals.tokens)) : f->weight;
}

// ---- the ratio ------------------------------------------------------------------------------------------------------

template <class F>
struct Ratio {
  F log_ratio, ratio, slope;
};
template <class F>
RLK_HD Ratio<F> ratio_of(const PolicySpec& s, F raw) {
  const F x = clamped(raw, s.log_ratio_min, s.log_ratio_max);
  F r;
  if (s.log_ratio_min >= kExpSmallest && s.log_ratio_max < kExpOverflow) {
    r = exp_in_range(x);
  } else {
    r = exp(x);
  }
  return {x, r, inside_or(raw, s.log_ratio_min, s.log_ratio_max, r, broadcast<F>(0.0f))};
}

// What a token adds to the log-ratio of kGeometricClip, and whether this value was clipped.
template <class F>
struct ClippedLogRatio {
  F value;
  MaskOf<F> clipped;
};
template <class F>
RLK_HD ClippedLogRatio<F> clipped_log_ratio(const PolicySpec& s, F raw, F advantage) {
  const F zero = broadcast<F>(0.0f);
  const auto positive = advantage > zero, negative = advantage < zero;
  const auto above = positive & (raw > broadcast<F>(s.clip_high)), below = negative & (raw < broadcast<F>(s.clip_low));
  const F x = select(above, broadcast<F>(s.clip_high), select(below, broadcast<F>(s.clip_low), raw));
  return {select(advantage == zero, zero, x), MaskOf<F>(above | below)};
}

// ---- policy terms ---------------------------------------------------------------------------------------------------

template <class F>
struct PolicyTerm {
  F value, along_ratio, along_logprob;
  MaskOf<F> clipped, dual;
};

template <class F>
RLK_HD PolicyTerm<F> clipped_ratio_term(const PolicySpec& s, F advantage, F r, F slope) {
  const F zero = broadcast<F>(0.0f), minus = -advantage;
  const auto numbers = (advantage == advantage) & (r == r);
  const auto times = [&](F factor) {  // scaled_by(minus, factor), for factors that are NaN only if r is
    const F product = mul_rn(minus, factor);
    return select(MaskOf<F>(is_nan(product) & numbers), zero, product);
  };
  const F p1 = times(min_of(r, broadcast<F>(s.ratio_cap)));
  const F p2 = times(clamped(r, s.clip_low, s.clip_high));
  const auto clipped = p2 > p1;
  PolicyTerm<F> t;
  t.value = select(clipped, p2, p1);
  const F e1 = select(r > broadcast<F>(s.ratio_cap), zero, slope);
  const F e2 = inside_or(r, s.clip_low, s.clip_high, slope, zero);
  const F p3 = mul_rn(minus, broadcast<F>(s.dual_clip));
  const auto dual = (advantage < zero) & (t.value > p3);
  t.value = select(dual, p3, t.value);
  t.along_ratio = times(select(dual, zero, select(clipped, e2, e1)));
  t.along_logprob = zero;
  t.clipped = clipped;
  t.dual = MaskOf<F>(dual);
  return t;
}

template <class F>
RLK_HD PolicyTerm<F> weighted_term(F advantage, F logprob, F w, MaskOf<F> clipped) {
  PolicyTerm<F> t;
  t.along_logprob = scaled_by(-w, advantage);
  t.value = scaled_by(t.along_logprob, logprob);
  t.along_ratio = broadcast<F>(0.0f);
  t.clipped = clipped;
  t.dual = clipped & (advantage < advantage);
  return t;
}

template <class F>
RLK_HD PolicyTerm<F> sigmoid_term(const PolicySpec& s, F advantage, F r, F slope) {
  const F zero = broadcast<F>(0.0f), one = broadcast<F>(1.0f);
  const auto positive = advantage > zero;
  const F tau = select(positive, broadcast<F>(s.tau_positive), broadcast<F>(s.tau_negative));
  const F gain =
      select(positive, broadcast<F>(div_rn(4.0f, s.tau_positive)), broadcast<F>(div_rn(4.0f, s.tau_negative)));
  const Sigmoids<F> gates = sigmoids(mul_rn(tau, sub_rn(r, one)));
  const F gate = gates.up, bump = mul_rn(mul_rn(broadcast<F>(4.0f), gate), gates.down);
  PolicyTerm<F> t;
  t.value = scaled_by(-mul_rn(gate, gain), advantage);
  t.along_ratio = scaled_by(-advantage, select(bump == zero, zero, mul_rn(bump, slope)));  // 0 if the ratio is infinite
  t.along_logprob = zero;
  t.clipped = t.dual = r < r;
  return t;
}

template <bool kOfSequence, class F>
RLK_HD PolicyTerm<F> policy_term(const PolicySpec& s, const PolicyFactors& f, F advantage, F logprob, F raw, F r,
                                 F slope) {
  const F zero = broadcast<F>(0.0f);
  const auto never = raw < raw;
  PolicyTerm<F> t;
  switch (s.surrogate) {
    case Surrogate::kRatio:
      t = clipped_ratio_term(s, advantage, r, slope);
      break;
    case Surrogate::kWeighted: {
      const F w = clamped(r, s.clip_low, s.clip_high);
      t = weighted_term(advantage, logprob, w, MaskOf<F>((w < r) | (w > r)));
      break;
    }
    case Surrogate::kLogprob:
      t = weighted_term(advantage, logprob, broadcast<F>(1.0f), MaskOf<F>(never));
      break;
    case Surrogate::kSigmoid:
      t = sigmoid_term(s, advantage, r, slope);
      break;
    case Surrogate::kGeometricClip: {
      if constexpr (!kOfSequence) return weighted_term(advantage, logprob, r, MaskOf<F>(never));  // unreachable
      const auto clipped = clipped_log_ratio(s, raw, advantage).clipped;
      t.value = broadcast<F>(f.value);
      t.along_ratio = zero;
      t.along_logprob = select(clipped | (advantage == zero), zero, t.value);
      t.clipped = MaskOf<F>(clipped & (advantage > zero));
      t.dual = MaskOf<F>(clipped & (advantage < zero));
      break;
    }
    case Surrogate::kGamma: {
      if constexpr (!kOfSequence) return weighted_term(advantage, logprob, r, MaskOf<F>(never));  // unreachable
      const F w = select(advantage >= zero, broadcast<F>(f.gamma_positive), broadcast<F>(f.gamma_negative));
      t = weighted_term(advantage, logprob, w, MaskOf<F>(never));
      break;
    }
    case Surrogate::kQuadratic: {
      const F penalty = mul_rn(mul_rn(broadcast<F>(0.5f * s.quadratic), raw), raw);
      t.value = sum_or_first(penalty, -scaled_by(logprob, advantage));
      t.along_ratio = zero;
      t.along_logprob = -sub_rn(advantage, mul_rn(broadcast<F>(s.quadratic), raw));
      t.clipped = t.dual = MaskOf<F>(never);
      break;
    }
  }
  return t;
}

// The derivative of the policy term with respect to the ratio, divided by the advantage A, for an A of the given sign.
// The shared gradient of a sequence needs the derivative for both signs.
RLK_HD float shared_slope(const PolicySpec& s, float sign, float r, float slope) {
  const PolicyTerm<float> t =
      s.surrogate == Surrogate::kSigmoid ? sigmoid_term(s, sign, r, slope) : clipped_ratio_term(s, sign, r, slope);
  return mul_rn(t.along_ratio, sign);  // -A |slope| divided by A, where A is `sign` (1 or -1)
}

// ---- the first pass -------------------------------------------------------------------------------------------------

struct PolicyStatisticsTerms : EverySum {
  static constexpr int kInputs = 7, kOutputs = 1, kSums = kPolicyStatistics;
  // kDropped: index of the input `selected`, if it drops tokens from the policy term; kWeight: index of token_weight
  static constexpr int kDropped = 5, kWeight = 6;
  using Params = PolicyLossParams;
  using Factors = PolicyFactors;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) {
    PolicyTokens a = policy_input(p, i == kDropped ? kInputSelected : i == kWeight ? kInputTokenWeight : i);
    if (!needs_statistics(p.spec) || (i == kInputRefLogprob && p.spec.kl_times_ratio != kTimesRatio)) a.data = nullptr;
    if (i == kDropped && p.spec.selected_drops == 0) a.data = nullptr;
    return a;
  }
  static RLK_HD float* output(const Params&, int) { return nullptr; }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors&, const F (&in)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>* sums) {
    const PolicySpec& s = p.spec;
    const F zero = broadcast<F>(0.0f);
    out[0] = zero;
    clear(sums);
    sums->count[kCountTokens] = counted<F>(mask);
    if (!needs_statistics(s)) return;
    const F l = in[kInputLogprob], o = in[kInputOldLogprob];
    const F a = in[kInputAdvantage], m = in[kInputImportance], raw = sub_rn(l, o);
    const F d = rollout_log_ratio(s.rollout_neutral != 0, either(s.importance_of_current != 0, l, o), m, m);
    F w = broadcast<F>(1.0f);
    if (s.importance == ImportanceLevel::kToken) w = importance_of_log(importance_bounds(s), d).weight;
    if (s.importance == ImportanceLevel::kGiven) w = m;
    F* const sum = sums->sum;
    sum[kStatLogRatio] = raw;
    if (s.surrogate == Surrogate::kGeometricClip) sum[kStatLogRatio] = clipped_log_ratio(s, raw, a).value;
    if (s.surrogate == Surrogate::kGamma) sum[kStatLogRatio] = clamped(raw, -kGammaLimit, kGammaLimit);
    if (has_rollout(p)) sum[kStatMismatch] = d;
    if (drops(s)) {
      const F behind = either(s.drop_by_rollout != 0, m, o);
      sum[kStatDrop] = rollout_log_ratio(s.drop_by_rollout != 0 && s.rollout_neutral != 0, behind, l, behind);
    }
    F product = mul_rn(a, w);
    const auto is_limit = is_nan(product) & (a == a) & (w == w);  // zero times infinity
    product = select((in[kDropped] < zero) | (in[kDropped] > zero) | MaskOf<F>(is_limit), zero, product);
    const bool is_weighted = p.token_weight.data != nullptr;
    if (is_weighted) product = scaled_by(product, in[kWeight]);
    // a NaN advantage does not give 0 here, but `product`, which is NaN
    sum[kStatPositive] = select(a <= zero, zero, product);
    sum[kStatNegative] = select(a < zero, product, zero);
    if (s.kl != KlEstimator::kNone && s.kl_times_ratio == kTimesRatio) {
      const bool straight_through = s.kl_straight_through != 0;
      sum[kStatKl] = kl_term(s.kl, l, in[kInputRefLogprob], s.kl_input_limit, straight_through, kKlMost).value;
      if (is_weighted) sum[kStatKl] = scaled_by(sum[kStatKl], in[kWeight]);
    }
    sum[kStatAdvantage] = a;
    if (s.surrogate == Surrogate::kGamma && has_importance(s)) {
      sum[kStatLogImportance] = clamped(log_of(w), kGammaLeast, kGammaLimit);
    } else if (s.surrogate == Surrogate::kGeometricClip && has_importance(s)) {
      sum[kStatLogImportance] = log_of(add_rn(w, broadcast<F>(kLeastWeight)));
    }
    RLK_UNROLL
    for (int i = 0; i < kSums; ++i) sum[i] = select(mask, sum[i], zero);
  }
};

RLK_HD float finite_or_zero(float x) { return x < infinity() || is_nan(x) ? x : 0.0f; }

// The factors that a sequence's tokens share, from the sums of the first pass. The function set_weights() sets the
// weights later.
RLK_HD PolicyFactors policy_factors(const PolicyLossParams& p, const SequenceSums<kPolicyStatistics>& of) {
  const PolicySpec& s = p.spec;
  PolicyFactors f;
  const std::int64_t n = of.count[kCountTokens];
  f.tokens = n;
  if (!needs_statistics(s) || n == 0) return f;
  const float tokens = static_cast<float>(n);
  const float mismatch = of.sum[kStatMismatch], mean_mismatch = div_rn(mismatch, tokens);
  if (importance_of_sequence(s)) {
    const ImportanceWeight<float> w =
        importance_of_log(importance_bounds(s), s.importance == ImportanceLevel::kSequence ? mismatch : mean_mismatch);
    f.importance = w.weight;
    f.importance_clipped = w.clipped;
  }
  if (s.gate != 0) {
    const float g = exp(mean_mismatch);
    f.gated = !(g >= s.gate_low && g <= s.gate_high);  // a NaN also sets `gated`
  }
  f.dropped = drops(s) && !(div_rn(of.sum[kStatDrop], tokens) <= s.drop_above);
  if (s.level == RatioLevel::kToken) return f;
  float raw = of.sum[kStatLogRatio];
  if (s.level == RatioLevel::kGeometric) raw = div_rn(raw, tokens);
  if (s.surrogate == Surrogate::kGamma) {
    if (has_importance(s)) raw = add_rn(raw, of.sum[kStatLogImportance]);
    const float x = clamped(raw, kGammaLeast, kGammaLimit), r = exp(x);
    f.ratio = r;
    f.gamma_positive =
        finite_or_zero(exp(sub_rn(add_rn(s.lambda_positive, mul_rn(s.k_positive, x)), mul_rn(s.lambda_positive, r))));
    f.gamma_negative =
        finite_or_zero(exp(sub_rn(add_rn(s.lambda_negative, mul_rn(s.k_negative, x)), mul_rn(s.lambda_negative, r))));
    return f;
  }
  const Ratio<float> ratio = ratio_of(s, raw);
  f.log_ratio = ratio.log_ratio;
  f.ratio = ratio.ratio;
  f.slope = ratio.slope;
  if (s.surrogate == Surrogate::kGeometricClip) {
    float weighted_ratio = ratio.ratio;
    if (has_importance(s)) weighted_ratio = exp(add_rn(ratio.log_ratio, div_rn(of.sum[kStatLogImportance], tokens)));
    f.value = scaled_by(-div_rn(of.sum[kStatAdvantage], tokens), weighted_ratio);
  }
  if (!has_shared_slope(s)) return f;
  float gradient = 0.0f;
  if (s.surrogate == Surrogate::kRatio || s.surrogate == Surrogate::kSigmoid) {
    // A sign that no advantage has adds no slope, even if the ratio's slope is infinite or NaN.
    const float positive = of.sum[kStatPositive], negative = f.dropped ? 0.0f : of.sum[kStatNegative];
    const float up = positive == 0.0f ? 0.0f : scaled_by(positive, shared_slope(s, 1.0f, f.ratio, f.slope));
    const float down = negative == 0.0f ? 0.0f : scaled_by(negative, shared_slope(s, -1.0f, f.ratio, f.slope));
    gradient = f.gated ? 0.0f : scaled_by(f.importance, add_rn(up, down));
  }
  f.kl_sum = of.sum[kStatKl];
  if (s.level == RatioLevel::kGeometric) f.kl_share = div_rn(1.0f, tokens);
  f.gradient = s.level == RatioLevel::kGeometric ? div_rn(gradient, tokens) : gradient;
  return f;
}

// ---- the pass over tokens -------------------------------------------------------------------------------------------

// Forms of the pass over tokens. A simpler form holds fewer values in registers.
enum class PolicyForm {
  kClipped,   // PPO's clip of a token's ratio, with neither importance weights nor selected tokens
  kTokens,    // any policy term that depends on one token
  kSequences  // policy terms that also depend on sums of the first pass
};
RLK_HD PolicyForm form_of(const PolicyLossParams& p) {
  if (needs_statistics(p.spec)) return PolicyForm::kSequences;
  const bool selects = p.selected.data != nullptr || p.spec.selected_drops != 0 || p.token_weight.data != nullptr;
  const bool clipped = p.spec.surrogate == Surrogate::kRatio && !has_importance(p.spec) && !selects;
  return clipped ? PolicyForm::kClipped : PolicyForm::kTokens;
}

template <PolicyForm kForm>
struct PolicyTokenTerms : EverySum {
  static constexpr bool kOfSequence = kForm == PolicyForm::kSequences, kClipped = kForm == PolicyForm::kClipped;
  static constexpr int kInputs = kPolicyInputs, kOutputs = 2, kSums = kPolicySums;
  static constexpr int kMaxima =
      // the maxima of the ratio, of the mismatch and (unless kClipped) of the importance weight
      kClipped ? 2 : kPolicyMaxima;
  using Params = PolicyLossParams;
  using Factors = PolicyFactors;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) {
    if (kClipped && (i == kInputImportance || i == kInputSelected || i == kInputTokenWeight)) return {};
    return policy_input(p, i);
  }
  static RLK_HD float* output(const Params& p, int i) { return i == 0 ? p.d_logprob : p.d_entropy; }
  // Without importance weights, the sum of the weights and the sum of their squares are exactly the number of tokens.
  // Among the last four sums, only the sum of the entropies must then be added.
  static RLK_HD bool sums_upper(const Params& p) { return !kClipped || p.entropy.data != nullptr; }
  static RLK_HD float upper_sum(int i, std::uint32_t tokens) {
    return i == kSumImportance || i == kSumImportanceSquared ? static_cast<float>(tokens) : 0.0f;
  }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors& f, const F (&in)[kInputs], MaskOf<F> mask,
                           F (&out)[kOutputs], TokenSums<F, kSums>* sums) {
    const PolicySpec& s = p.spec;
    const F zero = broadcast<F>(0.0f);
    const auto never = MaskOf<F>(zero > zero);
    const F l = in[kInputLogprob], o = in[kInputOldLogprob];
    const F a = in[kInputAdvantage], m = in[kInputImportance], raw = sub_rn(l, o);
    const bool of_token = !kOfSequence || s.level == RatioLevel::kToken;
    Ratio<F> x = {raw, broadcast<F>(f.ratio), broadcast<F>(f.slope)};
    if (of_token) x = ratio_of(s, raw);
    PolicyTerm<F> t;
    if constexpr (kClipped) {
      t = clipped_ratio_term(s, a, x.ratio, x.slope);
    } else {
      t = policy_term<kOfSequence>(s, f, a, l, raw, x.ratio, x.slope);
    }

    // The importance weight.
    F w = broadcast<F>(kOfSequence ? f.importance : 1.0f);
    auto w_clipped = either(kOfSequence && f.importance_clipped != 0, mask, never);
    if (!kClipped && s.importance == ImportanceLevel::kToken) {
      const F above = either(s.importance_of_current != 0, l, o);
      const ImportanceWeight<F> found =
          importance_of_log(importance_bounds(s), rollout_log_ratio(s.rollout_neutral != 0, above, m, m));
      w = found.weight;
      w_clipped = found.clipped;
    }
    if (!kClipped && s.importance == ImportanceLevel::kGiven) w = m;
    const bool merges = s.surrogate == Surrogate::kGamma || s.surrogate == Surrogate::kGeometricClip;
    if (!kClipped && has_importance(s) && !(kOfSequence && merges)) {
      t.value = scaled_by(t.value, w);
      t.along_ratio = scaled_by(t.along_ratio, w);
      t.along_logprob = scaled_by(t.along_logprob, w);
    }
    auto none = either(kOfSequence && s.surrogate == Surrogate::kGeometricClip, never, MaskOf<F>(a == zero));
    if (kOfSequence && f.dropped != 0) none = MaskOf<F>(none | (a < zero));
    if (kOfSequence && f.gated != 0) none = mask;
    auto selected = never;
    if (!kClipped && p.selected.data != nullptr) {
      selected = MaskOf<F>((in[kInputSelected] < zero) | (in[kInputSelected] > zero));
      if (s.selected_drops != 0) none = MaskOf<F>(none | selected);
    }
    t.value = select(none, zero, t.value);
    t.along_ratio = select(none, zero, t.along_ratio);
    t.along_logprob = select(none, zero, t.along_logprob);
    if (!kClipped && p.selected.data != nullptr && s.selected_drops == 0) {
      const F c = mul_rn(broadcast<F>(s.selected_kl), w);
      const F sign = select(raw > zero, c, select(raw < zero, -c, zero));
      t.value = select(selected, sum_or_first(t.value, scaled_by(c, abs_of(raw))), t.value);
      t.along_logprob = select(selected, add_rn(t.along_logprob, sign), t.along_logprob);
    }

    const bool is_weighted = !kClipped && p.token_weight.data != nullptr;
    const F u = in[kInputTokenWeight];
    if (is_weighted) {
      t.value = scaled_by(t.value, u);
      t.along_ratio = scaled_by(t.along_ratio, u);
      t.along_logprob = scaled_by(t.along_logprob, u);
    }

    // The conditions are counted here, so that registers need not hold them until the end.
    sums->count[kCountTokens] = counted<F>(mask);
    sums->count[kCountLow] =
        counted<F>(MaskOf<F>((x.ratio < broadcast<F>(s.clip_low)) & (a < zero)));  // the advantage of a masked token is
                                                                                   // 0
    sums->count[kCountHigh] = counted<F>(MaskOf<F>((x.ratio > broadcast<F>(s.clip_high)) & (a > zero)));
    // a masked token has a ratio of 1 and an advantage of 0, for which t.clipped and t.dual are false
    if constexpr (kClipped) {
      sums->count[kCountClipped] = counted<F>(t.clipped);
      sums->count[kCountDual] = counted<F>(t.dual);
      sums->count[kCountImportance] = counted<F>(never);
    } else {
      sums->count[kCountClipped] = counted<F>(either(s.selected_drops == kDropsAsClipped, selected, t.clipped) & mask);
      sums->count[kCountDual] = counted<F>(mask & t.dual);
      sums->count[kCountImportance] = counted<F>(mask & w_clipped);
    }

    const bool shared = kOfSequence && has_shared_slope(s);
    F slope = shared ? add_rn(t.along_logprob, broadcast<F>(f.gradient)) : add_rn(t.along_ratio, t.along_logprob);
    F kl = zero;
    if (s.kl != KlEstimator::kNone) {
      const bool straight_through = s.kl_straight_through != 0;
      const F ref = in[kInputRefLogprob];
      KlTerm<F> k =
          kl_term(s.kl, l, ref, s.kl_input_limit, straight_through, s.kl_times_ratio != 0 ? kKlMost : kLargestFloat);
      F others = zero;
      if (s.kl_times_ratio != 0) {
        F share = select(MaskOf<F>((x.slope < x.ratio) | (x.slope > x.ratio)), zero,
                         broadcast<F>(shared ? f.kl_share : 1.0f));
        F log = either(of_token, x.log_ratio, broadcast<F>(f.log_ratio)), ratio = x.ratio;
        auto of_l = either(of_token, MaskOf<F>(x.log_ratio == raw), never);
        if (kOfSequence && s.kl_times_ratio == kTimesOwnRatio) {
          share = broadcast<F>(1.0f);
          log = raw;
          ratio = exp(raw);
          of_l = MaskOf<F>(zero == zero);
        } else if (shared) {
          const F own = is_weighted ? scaled_by(k.value, u) : k.value;
          // `rest` is the sum of K over the other tokens. `rest` is left out if this token's K is infinite, because
          // infinity minus infinity is NaN.
          const F rest = sub_rn(broadcast<F>(f.kl_sum), own);
          others = select(abs_of(own) == broadcast<F>(infinity()), zero, scaled_by(mul_rn(share, x.ratio), rest));
        }
        k = kl_times_ratio<false>(s.kl, straight_through, k, l, ref, o, s.kl_input_limit, {log, ratio, share, of_l});
      }
      if (s.kl_gradient_ratio > 0.0f) {
        k.slope = scaled_by(k.slope, min_of(x.ratio, broadcast<F>(s.kl_gradient_ratio)));
      }
      k = limited_kl(k, s.kl_limit, straight_through);
      if (is_weighted) k = {scaled_by(k.value, u), scaled_by(k.slope, u)};
      k.slope = add_rn(k.slope, others);
      kl = k.value;
      if (s.kl_coef != 0.0f) slope = fma_rn(broadcast<F>(s.kl_coef), k.slope, slope);
    }
    out[0] = canonical(where(mask, weighted(f.weight, slope)));
    out[1] = where(mask, broadcast<F>(weighted(f.entropy_weight, -s.entropy_coef)));
    if (is_weighted) out[1] = canonical(where(mask, scaled_by(out[1], u)));

    const F mismatch = !kClipped && has_rollout(p) ? abs_of(rollout_log_ratio(s.rollout_neutral != 0, o, m, m)) : zero;
    F* const sum = sums->sum;
    sum[kSumPolicy] = t.value;
    sum[kSumKl] = kl;
    sum[kSumEntropy] = is_weighted && p.entropy.data != nullptr ? scaled_by(in[kInputEntropy], u) : in[kInputEntropy];
    sum[kSumPpoKl] = of_token ? -x.log_ratio : sub_rn(o, l);
    sum[kSumRatio] = x.ratio;
    sum[kSumImportance] = w;
    sum[kSumImportanceSquared] = mul_rn(w, w);
    sum[kSumMismatch] = mismatch;
    // The inputs of a masked token are 0. Any term without a mask below is therefore 0 for such a token.
    if (!kClipped) sum[kSumPpoKl] = where(mask, sum[kSumPpoKl]);
    sum[kSumRatio] = where(mask, sum[kSumRatio]);
    sum[kSumImportance] = where(mask, sum[kSumImportance]);
    sum[kSumImportanceSquared] = where(mask, sum[kSumImportanceSquared]);
    // with kGeometricClip, every token of a sequence has the same value, even a masked token
    if (kOfSequence) sum[kSumPolicy] = where(mask, sum[kSumPolicy]);
    sums->maximum[0] = sum[kSumRatio];
    sums->maximum[1] = mismatch;
    // The maximum is at least 0, although importance weights that the caller gives may be negative.
    if (!kClipped) sums->maximum[2] = max_of(add_rn(sum[kSumImportance], zero), zero);
  }
};

using PolicyLossTerms = PolicyTokenTerms<PolicyForm::kSequences>;

}  // namespace rlk
