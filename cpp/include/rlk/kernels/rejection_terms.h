// The formulas of ops/importance_weights.h that every backend shares, and what of a call would corrupt memory.
#pragma once

#include "rlk/kernels/importance_terms.h"
#include "rlk/kernels/policy_check.h"
#include "rlk/math/expm1.h"
#include "rlk/ops/importance_weights.h"

namespace rlk {

inline void check_importance_weights(const ImportanceWeightsParams& p) {
  check_sequences(p.sequences, p.mask, "importance_weights");
  const ImportanceSpec& s = p.spec;
  RLK_CHECK(s.level == ImportanceLevel::kToken || s.level == ImportanceLevel::kSequence ||
                s.level == ImportanceLevel::kGeometric,
            "importance_weights: level is kToken, kSequence or kGeometric");
  RLK_CHECK(s.limit > 0.0f, "importance_weights: limit is positive");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.logprob.data && p.logprob.token_stride == 1, "importance_weights: logprob, one a token");
  RLK_CHECK(p.rollout_logprob.data && p.rollout_logprob.token_stride == 1,
            "importance_weights: rollout_logprob, one a token");
  RLK_CHECK(p.weights != nullptr && p.kept != nullptr, "importance_weights: weights and kept are given");
}

constexpr float kLeastMeanWeight = 1e-8f;

RLK_HD ImportanceBounds importance_bounds(const ImportanceSpec& s) {
  return {s.low, s.high, s.limit, s.zero_outside != 0};
}
RLK_HD bool rejects(const RejectionBounds& b) {
  return b.k1_low > -infinity() || b.k1_high < infinity() || b.k2 < infinity() || b.k3 < infinity();
}
RLK_HD bool vetoes(const ImportanceSpec& s) { return s.veto_below > -infinity(); }
// Whether a token needs sums over its sequence.
RLK_HD bool needs_statistics(const ImportanceSpec& s) {
  return s.level != ImportanceLevel::kToken || rejects(s.sum) || rejects(s.mean) || rejects(s.most) || vetoes(s);
}

template <class F>
struct Divergence {
  F k1, k2, k3;
};
template <class F>
RLK_HD Divergence<F> divergence_of(F c) {
  return {-c, mul_rn(mul_rn(broadcast<F>(0.5f), c), c), max_of(sub_rn(expm1(c), c), broadcast<F>(0.0f))};
}
// `kept` and what the bounds that are there allow.
template <class F>
RLK_HD MaskOf<F> inside(const RejectionBounds& b, const Divergence<F>& k, MaskOf<F> kept) {
  if (b.k1_low > -infinity()) kept = MaskOf<F>(kept & (k.k1 >= broadcast<F>(b.k1_low)));
  if (b.k1_high < infinity()) kept = MaskOf<F>(kept & (k.k1 <= broadcast<F>(b.k1_high)));
  if (b.k2 < infinity()) kept = MaskOf<F>(kept & (k.k2 <= broadcast<F>(b.k2)));
  if (b.k3 < infinity()) kept = MaskOf<F>(kept & (k.k3 <= broadcast<F>(b.k3)));
  return kept;
}

// What is the same for a sequence's tokens.
struct ImportanceFactors {
  float weight = 0.0f;
  std::int32_t kept = 1;
  std::int32_t broken = 0;  // the cuts beside it do not ascend
};

enum : int { kStatOfRatio, kStatOfLimited, kStatK2, kStatK3 };
enum : int { kStatTokens, kStatAboveVeto };

struct ImportanceStatisticsTerms : EverySum {
  static constexpr int kInputs = 2, kOutputs = 1, kSums = 8;
  struct Factors {};
  using Params = ImportanceWeightsParams;
  static RLK_HD const PolicySequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const PolicyMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == 0 ? p.logprob : p.rollout_logprob; }
  static RLK_HD float* output(const Params&, int) { return nullptr; }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors&, const F (&in)[kInputs], MaskOf<F> mask, F (&out)[kOutputs],
                           TokenSums<F, kSums>* sums) {
    const F zero = broadcast<F>(0.0f), d = sub_rn(in[0], in[1]), c = clamped(d, -p.spec.limit, p.spec.limit);
    const Divergence<F> k = divergence_of(c);  // of a masked token, whose d is 0, nothing
    out[0] = zero;
    clear(sums);
    sums->sum[kStatOfRatio] = d;
    sums->sum[kStatOfLimited] = c;
    sums->sum[kStatK2] = k.k2;
    sums->sum[kStatK3] = k.k3;
    sums->count[kStatTokens] = counted<F>(mask);
    sums->count[kStatAboveVeto] = counted<F>(MaskOf<F>(mask & (d >= broadcast<F>(p.spec.veto_below))));
    sums->maximum[0] = k.k2;
    sums->maximum[1] = k.k3;
  }
};

RLK_HD ImportanceFactors importance_factors(const ImportanceWeightsParams& p, std::int64_t sequence,
                                            const SequenceSums<8>& of) {
  const ImportanceSpec& s = p.spec;
  const std::int64_t tokens = of.count[kStatTokens];
  ImportanceFactors f;
  f.broken = has_bad_cuts(p.sequences, sequence);
  if (tokens == 0) return f;
  const float n = static_cast<float>(tokens), d = of.sum[kStatOfRatio];
  if (s.level != ImportanceLevel::kToken) {
    f.weight = importance_of_log(importance_bounds(s), s.level == ImportanceLevel::kSequence ? d : div_rn(d, n)).weight;
  }
  const Divergence<float> sum = {-of.sum[kStatOfLimited], of.sum[kStatK2], of.sum[kStatK3]};
  bool kept = !vetoes(s) || of.count[kStatAboveVeto] == tokens;
  kept = inside(s.sum, sum, kept);
  kept = inside<float>(s.mean, {div_rn(sum.k1, n), div_rn(sum.k2, n), div_rn(sum.k3, n)}, kept);
  kept = inside<float>(s.most, {0.0f, of.maximum[0], of.maximum[1]}, kept);
  f.kept = kept;
  return f;
}

struct ImportanceTokenTerms : LowerSums {
  static constexpr int kInputs = 2, kOutputs = 2, kSums = 8;
  using Factors = ImportanceFactors;
  using Params = ImportanceWeightsParams;
  static RLK_HD const PolicySequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const PolicyMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return i == 0 ? p.logprob : p.rollout_logprob; }
  static RLK_HD float* output(const Params& p, int i) { return i == 0 ? p.weights : p.kept; }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors& f, const F (&in)[kInputs], MaskOf<F> mask,
                           F (&out)[kOutputs], TokenSums<F, kSums>* sums) {
    const ImportanceSpec& s = p.spec;
    const F zero = broadcast<F>(0.0f), one = broadcast<F>(1.0f), d = sub_rn(in[0], in[1]);
    const auto never = MaskOf<F>(zero > zero);
    F w = broadcast<F>(f.weight);
    if (s.level == ImportanceLevel::kToken) w = importance_of_log(importance_bounds(s), d).weight;
    w = either(f.broken != 0, broadcast<F>(canonical_nan()), w);
    auto kept = either(f.kept != 0 && f.broken == 0, mask, never);
    if (rejects(s.token)) kept = inside(s.token, divergence_of(clamped(d, -s.limit, s.limit)), kept);
    out[0] = canonical(where(mask, w));
    out[1] = select(kept, one, zero);
    clear(sums);
    sums->sum[0] = where(mask, w);
    sums->count[kStatTokens] = counted<F>(mask);
  }
};

// Its total is the mean weight that all are divided by.
struct ImportanceBatch {
  static constexpr int kGroups = 1, kSums = 1, kCounts = 3, kMaxima = 1;
  enum : int { kTokens, kSequences, kBadCuts };
  using Params = ImportanceWeightsParams;
  using Factors = ImportanceFactors;
  struct Shared {
    float divisor;
  };
  using Context = TokenContext<ImportanceBatch>;
  using Statistics = ImportanceStatisticsTerms;
  using Total = TotalSums<kSums, kCounts, kMaxima>;
  static RLK_HD const PolicySequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD bool needs_pass_before(const Params& p) { return needs_statistics(p.spec); }
  static RLK_HD bool needs_sums(const Params& p) { return p.spec.normalize != 0; }
  static RLK_HD Factors factors_of(const Params& p, std::int64_t s, const SequenceSums<8>& of) {
    return importance_factors(p, s, of);
  }
  template <class Add>
  static RLK_HD void share(const Factors&, Shared*, const Add&) {}
  template <class Terms>
  static RLK_HD Factors factors(const Params& p, const Context& context, bool has_pass_before, std::int64_t s) {
    if (has_pass_before) return in_global(context.factors)[s];
    Factors f;
    f.broken = has_bad_cuts(p.sequences, s);
    return f;
  }
  static RLK_HD Total missing() { return {}; }
  static RLK_HD Total of_sequence(const Params& p, const Context& context, std::int64_t s,
                                  const SequenceSums<8> (&groups)[kGroups]) {
    Total t = {};
    const std::int64_t tokens = groups[0].count[kStatTokens];
    t.count[kBadCuts] = has_bad_cuts(p.sequences, s);
    if (tokens == 0) return t;
    t.count[kTokens] = tokens;
    t.count[kSequences] = 1;
    t.sum[0] = p.spec.level == ImportanceLevel::kToken ? groups[0].sum[0] : in_global(context.factors)[s].weight;
    return t;
  }
  static RLK_HD void store(const Params& p, const Context& context, const Total& t) {
    const bool of_token = p.spec.level == ImportanceLevel::kToken;
    const float mean = quotient_or_zero(t.sum[0], static_cast<float>(t.count[of_token ? kTokens : kSequences]));
    const float divisor = mean <= kLeastMeanWeight ? 1.0f : mean;
    in_global(context.shared)->divisor = t.count[kBadCuts] > 0 ? canonical_nan() : divisor;
  }
};

template <class F>
RLK_HD F normalized(F weight, float divisor) {
  const F zero = broadcast<F>(0.0f);
  return select(weight == zero, zero, canonical(div_rn(weight, broadcast<F>(divisor))));
}

}  // namespace rlk
