// The formulas of ops/gae.h, shared by all backends.
#pragma once

#include "kernels/tokens/slots.h"
#include "rlk/math/exp.h"
#include "rlk/math/ieee.h"
#include "rlk/ops/gae.h"

namespace rlk {

// Returns true if a GPU's block has nothing to scan. A block without a scan writes +0 to tokens outside every sequence,
// and NaN to tokens of a sequence with bad offsets.
RLK_HD bool clears_or_spoils(const GaeParams& p, std::int64_t block, int thread, int threads) {
  const Sequences& q = p.sequences;
  if (!q.packed()) return false;
  const std::int64_t rest = block - q.num_sequences;
  const bool is_bad = rest < 0 && has_bad_offsets(q, block);
  for (const TokenArray<float>& a : {p.advantages, p.returns}) {
    if (rest >= 0) clear_rest(q, a.data, rest, rest_blocks(q), thread, threads);
    if (is_bad) spoil_sequence(a.data, span_of(q, block), a.row_stride, thread, threads);
  }
  return rest >= 0 || is_bad;
}

// A step of the scan for one token. The scan runs from a sequence's end to its start, and x is its state. The step
// turns the state x after a token into the state at this token: c x + d, or d if c is 0.
struct ScanStep {
  float c, d;
};
RLK_HD float scan_advance(const ScanStep& s, float x) { return select(s.c == 0.0f, s.d, fma_rn(s.c, x, s.d)); }
RLK_HD ScanStep scan_compose(const ScanStep& one, const ScanStep& two) {
  const bool cut = one.c == 0.0f;
  return {select(cut, 0.0f, mul_rn(one.c, two.c)), select(cut, one.d, fma_rn(one.c, two.d, one.d))};
}

// Constants that all tokens of a call share.
struct GaeConstants {
  float gamma, decay, rho_bar, c_bar;
  explicit RLK_HD GaeConstants(const GaeParams& p)
      : gamma(p.gamma), decay(mul_rn(p.gamma, p.lam)), rho_bar(p.rho_bar), c_bar(p.c_bar) {}
};

RLK_HD float min_or_nan(float x, float bound) { return select(x > bound, bound, x); }

RLK_HD float vtrace_log_ratio(bool neutral, float logprob, float rollout_logprob) {
  return select(neutral && is_nan(rollout_logprob), 0.0f, sub_rn(logprob, rollout_logprob));
}

// The step of an unmasked token. Only vtrace uses `log_ratio` and `rho`.
template <GaeKind kKind>
RLK_HD ScanStep gae_step(const GaeConstants& k, float reward, float value, float next, float log_ratio, float* rho) {
  if constexpr (kKind == GaeKind::kDiscountedReturns) return {k.gamma, reward};
  const float delta = sub_rn(fma_rn(k.gamma, next, reward), value);
  if constexpr (kKind == GaeKind::kGae) return {k.decay, delta};
  const float ratio = exp(log_ratio);
  *rho = min_or_nan(ratio, k.rho_bar);
  return {mul_rn(k.decay, min_or_nan(ratio, k.c_bar)), mul_rn(*rho, delta)};
}

// The advantage of vtrace for an unmasked token. x is the scan's state after the token.
RLK_HD float vtrace_advantage(const GaeConstants& k, float reward, float value, float next, float x, float rho) {
  return mul_rn(rho, sub_rn(fma_rn(k.gamma, add_rn(next, x), reward), value));
}

RLK_HD float canonical(float x) { return select(is_nan(x), canonical_nan(), x); }

}  // namespace rlk
