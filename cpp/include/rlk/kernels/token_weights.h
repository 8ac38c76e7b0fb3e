// What the terms of a token are multiplied by in a loss: aggregations, which objectives share. Params: spec.denominator,
// spec.sequence_mean, spec.horizon, spec.scale; denominator, denominator_value; sequences.
#pragma once

#include <cstdint>

#include "rlk/math/ieee.h"
#include "rlk/policy_sequences.h"

namespace rlk {

struct PolicyTotals {
  std::int64_t tokens, sequences;  // sequences that have a token
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

RLK_HD float quotient_or_zero(float a, float b) { return b == 0.0f ? 0.0f : div_rn(a, b); }

// Of a token of a sequence that has `n`.
template <class Params>
RLK_HD float token_weight(const Params& p, const PolicyTotals& totals, std::int64_t n) {
  float q = quotient_or_zero(p.spec.scale, denominator_of(p, totals));
  if (p.spec.horizon != 0.0f) q = div_rn(q, p.spec.horizon);
  if (p.spec.sequence_mean != 0) q = quotient_or_zero(q, static_cast<float>(n));
  return q;
}

}  // namespace rlk
