// The formulas of ops/scatter_rewards.h for one token, shared by every backend, and the checks for memory safety.
#pragma once

#include "kernels/losses/kl_terms.h"
#include "kernels/losses/policy_check.h"
#include "rlk/ops/scatter_rewards.h"

namespace rlk {

inline void check_scatter_rewards(const ScatterRewardsParams& p) {
  check_sequences(p.sequences, p.mask, "scatter_rewards");
  const RewardSpec& s = p.spec;
  RLK_CHECK(s.overlong_buffer > 0, "scatter_rewards: overlong_buffer is positive");
  RLK_CHECK(p.rewards.token_stride == 0 || !p.rewards.data, "scatter_rewards: rewards has one a sequence");
  RLK_CHECK(p.cost.token_stride == 0 || !p.cost.data, "scatter_rewards: cost has one a sequence");
  RLK_CHECK(p.token_rewards.token_stride == 1, "scatter_rewards: token_rewards has one a token");
  check_offsets(p.spans);
  check_offsets(p.span_offsets);
  RLK_CHECK(p.num_spans >= 0 && (p.span_offsets.data || p.num_spans == 0),
            "scatter_rewards: span_offsets are given with spans");
  RLK_CHECK(p.num_spans == 0 || (p.spans.data && p.span_rewards), "scatter_rewards: spans have rewards");
  RLK_CHECK(p.lengths || p.sequences.num_sequences == 0, "scatter_rewards: lengths are given");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.to_tokens, "scatter_rewards: an output is given");
  if (s.kl == KlEstimator::kNone) return;
  RLK_CHECK(p.logprob.data && p.logprob.token_stride == 1, "scatter_rewards: logprob is given, one a token");
  RLK_CHECK(p.ref_logprob.data && p.ref_logprob.token_stride == 1,
            "scatter_rewards: ref_logprob is given, one a token");
}

// Turns -0 into +0, and every NaN into the canonical NaN.
template <class F>
RLK_HD F finished_reward(F x) {
  return canonical(add_rn(x, broadcast<F>(0.0f)));
}
RLK_HD float checked_lagrange(float lagrange) {
  return lagrange >= 0.0f && lagrange < infinity() ? lagrange : canonical_nan();
}
RLK_HD float lagrange_of(const ScatterRewardsParams& p) {
  return p.lagrange == nullptr ? p.lagrange_value : checked_lagrange(*in_global(p.lagrange));
}
template <class F>
RLK_HD F combined_reward(const RewardSpec& s, F reward, F cost, float lagrange) {
  F x = sub_rn(reward, scaled_by(cost, broadcast<F>(lagrange)));
  if (s.normalize_lagrange != 0) x = div_rn(x, broadcast<F>(add_rn(1.0f, lagrange)));
  return finished_reward(x);
}
RLK_HD float given_reward(const ScatterRewardsParams& p, std::int64_t s) {
  return p.rewards.data == nullptr ? 0.0f : in_global(p.rewards.data)[s * p.rewards.sequence_stride];
}
// The reward of a sequence with n unmasked tokens.
RLK_HD float sequence_reward(const RewardSpec& spec, float given, std::int64_t n) {
  const float penalised = sub_rn(given, mul_rn(spec.length_penalty, static_cast<float>(n)));
  const float left = static_cast<float>(spec.overlong_begin - n), buffer = static_cast<float>(spec.overlong_buffer);
  return add_rn(penalised, min_of(mul_rn(div_rn(left, buffer), spec.overlong_penalty), 0.0f));
}

// A tile has two results: the number of its unmasked tokens, and the place of the last of them. A token's place is its
// position minus the preceding multiple of 2^kWindow, plus one. A maximum over the tile's tokens finds the last place.
constexpr int kWindow = 13;

enum RewardInput : int { kRewardOfToken, kRewardLogprob, kRewardRefLogprob, kRewardInputs };
enum RewardOutput : int { kRewardValue, kRewardCost, kRewardCombined, kRewardOutputs };

struct RewardTokenTerms : NoSums {
  static constexpr int kInputs = kRewardInputs, kOutputs = kRewardOutputs, kSums = 8;
  static constexpr bool kTakesPosition = true;
  using Params = ScatterRewardsParams;
  struct Factors {
    float added;  // +0, or NaN for a sequence with bad offsets
    float lagrange;
  };
  static RLK_HD Factors factors(const Params& p, std::int64_t s) {
    return {has_bad_offsets(p.sequences, s) ? canonical_nan() : 0.0f, p.combined == nullptr ? 0.0f : lagrange_of(p)};
  }
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) {
    if (i == kRewardOfToken) return p.token_rewards;
    if (p.spec.kl == KlEstimator::kNone) return {};
    return i == kRewardLogprob ? p.logprob : p.ref_logprob;
  }
  static RLK_HD float* output(const Params& p, int i) {
    return i == kRewardValue ? p.to_tokens : i == kRewardCost ? p.costs : p.combined;
  }

  template <class F>
  static RLK_HD void token(const Params& p, const Factors& f, const F (&in)[kInputs], MaskOf<F> mask,
                           F (&out)[kOutputs], TokenSums<F, kSums>* sums, std::int64_t position) {
    const RewardSpec& s = p.spec;
    const F zero = broadcast<F>(0.0f);
    F x = in[kRewardOfToken];
    if (s.kl != KlEstimator::kNone) {
      const KlTerm<F> k = kl_term(s.kl, in[kRewardLogprob], in[kRewardRefLogprob], s.kl_input_limit, false);
      x = sub_rn(x, mul_rn(broadcast<F>(s.kl_coef), limited_kl(k, s.kl_limit, false).value));
    }
    out[kRewardValue] = canonical(where(mask, add_rn(x, broadcast<F>(f.added))));
    out[kRewardCost] = zero;
    out[kRewardCombined] = zero;
    if (p.combined != nullptr) {
      out[kRewardCombined] = where(mask, combined_reward(s, out[kRewardValue], zero, f.lagrange));
    }
    clear(sums);
    sums->count[0] = counted<F>(mask);
    sums->maximum[0] = where(mask, places<F>(position));
  }

 private:
  // Position of each token, counted from 1 at the start of its window.
  template <class F>
  static RLK_HD F places(std::int64_t position) {
    constexpr int kCount = sizeof(F) / sizeof(float);
    const int first = static_cast<int>(position & ((1 << kWindow) - 1)) + 1;
    float next[kCount];
    RLK_UNROLL
    for (int i = 0; i < kCount; ++i) next[i] = static_cast<float>(i);
    F from_first;
    __builtin_memcpy(&from_first, next, sizeof from_first);
    return add_rn(broadcast<F>(static_cast<float>(first)), from_first);
  }
};

}  // namespace rlk
