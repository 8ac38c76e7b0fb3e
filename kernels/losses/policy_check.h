// Every backend checks these preconditions of a policy_loss call, because a violation would corrupt memory. Users'
// input is checked earlier, by the bindings.
#pragma once

#include "kernels/losses/policy_terms.h"

namespace rlk {

inline void check_sequences(const Sequences& q, const TokenMask& mask, const char* op) {
  const auto say = [&](const char* what) { return std::string(op) + ": " + what; };
  RLK_CHECK(q.num_sequences >= 0 && q.num_tokens >= 0, say("sizes are not negative"));
  RLK_CHECK(q.num_sequences < std::int64_t{1} << 31, say("fewer than 2^31 sequences"));
  RLK_CHECK(q.num_tokens < std::int64_t{1} << 33, say("fewer than 2^33 tokens"));
  check_offsets(q.offsets());
  check_mask(mask);
}

inline void check_policy_loss(const PolicyLossParams& p) {
  check_sequences(p.sequences, p.mask, "policy_loss");
  if (p.sequences.num_slots() == 0) return;
  RLK_CHECK(p.mask.data, "policy_loss: mask is given");
  RLK_CHECK(p.logprob.data && p.logprob.token_stride == 1, "policy_loss: logprob is given, one a token");
  RLK_CHECK(p.old_logprob.token_stride == 1, "policy_loss: old_logprob has one a token");
  RLK_CHECK(p.advantage.data, "policy_loss: advantage is given");
  RLK_CHECK(p.ref_logprob.data || p.spec.kl == KlEstimator::kNone, "policy_loss: ref_logprob is given with kl");
  RLK_CHECK(p.importance.data || !(has_importance(p.spec) || p.spec.gate || (drops(p.spec) && p.spec.drop_by_rollout)),
            "policy_loss: rollout_logprob is given with importance weights");
  RLK_CHECK(p.entropy.data || p.d_entropy == nullptr, "policy_loss: entropy is given with d_entropy");
  const PolicySpec& s = p.spec;
  RLK_CHECK(
      p.token_weight.data == nullptr || (p.token_weight.token_stride == 1 && s.surrogate != Surrogate::kGeometricClip),
      "policy_loss: token_weight has one a token, and kGeometricClip none");
  RLK_CHECK(s.log_ratio_min <= s.log_ratio_max && s.clip_low <= s.clip_high && s.importance_low <= s.importance_high,
            "policy_loss: lower bounds are not above upper ones");
}

inline void check_scale_gradients(const ScaleGradientsParams& p) {
  RLK_CHECK(p.count >= 0, "scale_gradients: count is not negative");
  RLK_CHECK(p.count == 0 || p.factor, "scale_gradients: factor is given");
}

}  // namespace rlk
