// The weights of tokens in a loss, which depend on how the loss aggregates tokens. The file also has what the Batches
// (terms.h) of losses have in common. Params has spec.denominator, spec.sequence_mean, spec.horizon, spec.scale;
// denominator, denominator_value; sequences.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/tokens/terms.h"
#include "rlk/tokens.h"

namespace rlk {

struct PolicyTotals {
  std::int64_t tokens, sequences;  // sequences: those with an unmasked token
};

template <class Params>
RLK_HD bool counts_denominator(const Params& p) {
  return p.denominator == nullptr && p.denominator_value == 0.0f &&
         (p.spec.denominator == DenominatorKind::kTokens ||
          p.spec.denominator == DenominatorKind::kSequencesWithTokens);
}
template <class Params>
RLK_HD float denominator_of(const Params& p, const PolicyTotals& totals) {
  if (p.denominator != nullptr) return *in_global(p.denominator);
  if (p.denominator_value != 0.0f) return p.denominator_value;
  switch (p.spec.denominator) {
    case DenominatorKind::kOne:
      return 1.0f;
    case DenominatorKind::kTokens:
      return static_cast<float>(totals.tokens);
    case DenominatorKind::kSequences:
      return static_cast<float>(p.sequences.num_sequences);
    case DenominatorKind::kSequencesWithTokens:
      break;
  }
  return static_cast<float>(totals.sequences);
}

// scale / denominator. The result is 0 if the denominator is 0. The result is NaN if the denominator is negative,
// subnormal, infinite or NaN. Subnormals are refused because their inverses may be infinite.
RLK_HD float share_of(float scale, float denominator) {
  if (denominator == 0.0f) return 0.0f;
  return denominator >= 0x1p-126f && denominator < infinity() ? div_rn(scale, denominator) : canonical_nan();
}
// The weight of a token whose sequence has `n` tokens.
template <class Params>
RLK_HD float token_weight(const Params& p, const PolicyTotals& totals, std::int64_t n) {
  float q = share_of(p.spec.scale, denominator_of(p, totals));
  if (p.spec.horizon != 0.0f) q = div_rn(q, p.spec.horizon);
  if (p.spec.sequence_mean != 0) q = quotient_or_zero(q, static_cast<float>(n));
  return q;
}

// A term times its weight. A weight of 0 gives 0 even if the term is infinite or NaN.
template <class F>
RLK_HD F weighted(float weight, F term) {
  return either(weight == 0.0f, broadcast<F>(0.0f), mul_rn(broadcast<F>(weight), term));
}

// Indices of a batch's counts. The counts of tiles come first, and then the counts that only a batch has.
enum : int { kCountTokens };
enum : int { kCountSequences = kTokenCounts, kCountBadCuts, kLossCounts };

// The base class of the Batch of a loss. The loss must have needs_counts(p), needs_totals(p) and set_weights(p, totals,
// tokens, factors). kOfSequence tells whether the terms need more from a sequence than its number of tokens.
template <class P, class F>
struct LossBatch {
  static constexpr int kGroups = 1, kCounts = kLossCounts;
  using Params = P;
  using Factors = F;
  using Shared = PolicyTotals;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD bool needs_pass_before(const Params& p) { return needs_counts(p); }
  static RLK_HD bool counts_alone(const Params&) { return true; }
  static RLK_HD bool needs_sums(const Params&) { return true; }
  static RLK_HD bool shares(const Params& p) { return needs_totals(p); }
  template <class Add>
  static RLK_HD void share(const Factors& f, PolicyTotals* shared, const Add& add) {
    if (f.tokens == 0) return;
    add(&shared->tokens, f.tokens);
    add(&shared->sequences, 1);
  }
  template <class Terms, class Context>
  static RLK_HD Factors factors(const Params& p, const Context& context, bool has_pass_before, std::int64_t s) {
    Factors f;
    PolicyTotals totals = {0, 0};
    if (has_pass_before) {
      if constexpr (Terms::kOfSequence) {
        f = in_global(context.factors)[s];
      } else {
        f.tokens = in_global(context.factors)[s].tokens;
      }
      totals = *in_global(context.shared);
    }
    set_weights(p, totals, f.tokens, &f);
    return f;
  }
  // The totals of the batch, or zeros if no result depends on the totals. `context` is a TokenContext, or the totals
  // themselves.
  template <class Context>
  static RLK_HD PolicyTotals totals_of(const Params& p, const Context& context) {
    PolicyTotals totals = {0, 0};
    if constexpr (std::is_same_v<Context, PolicyTotals>) {
      if (needs_totals(p)) totals = context;
    } else {
      if (needs_totals(p)) totals = *in_global(context.shared);
    }
    return totals;
  }
  template <class Total>
  static RLK_HD void count(const Params& p, std::int64_t s, const SequenceSums<8>& of, Total* t) {
    for (int i = 0; i < kTokenCounts; ++i) t->count[i] = of.count[i];
    t->count[kCountSequences] = of.count[kCountTokens] > 0;
    t->count[kCountBadCuts] = has_bad_offsets(p.sequences, s);
  }
};

}  // namespace rlk
