// Random calls of policy_loss that reach every combination of a spec, for the tests of every backend.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rlk/ops/policy_loss.h"
#include "token_reference.h"

namespace policy_test {

// Arrays of a call in memory; masked elements are NaN, infinite or large.
struct Case {
  rlk::PolicyLossParams p;
  std::vector<float> arrays[8];
  std::vector<unsigned char> mask;
  std::vector<std::int32_t> cuts32;
  std::vector<std::int64_t> cuts64;
  std::string text;
};

inline rlk::PolicySpec random_spec(std::mt19937* random) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto pick = [&](int n) { return static_cast<int>((*random)() % static_cast<unsigned>(n)); };
  const auto one_in = [&](int n) { return pick(n) == 0; };
  rlk::PolicySpec s;
  s.level = static_cast<rlk::RatioLevel>(pick(3));
  s.surrogate = static_cast<rlk::Surrogate>(pick(7));
  if (s.surrogate == rlk::Surrogate::kQuadratic) s.level = rlk::RatioLevel::kToken;
  if (s.surrogate == rlk::Surrogate::kGeometricClip) s.level = rlk::RatioLevel::kGeometric;
  if (s.surrogate == rlk::Surrogate::kGamma) s.level = rlk::RatioLevel::kSequence;
  s.straight_through = pick(2);
  s.log_ratio_max = one_in(2) ? kInf : 0.3f;
  s.log_ratio_min = one_in(2) ? -kInf : -0.4f;
  s.clip_low = one_in(4) ? -kInf : 0.8f;
  s.clip_high = one_in(4) ? kInf : 1.25f;
  if (s.surrogate == rlk::Surrogate::kGeometricClip) {
    s.clip_low = -0.2f;
    s.clip_high = 0.3f;
  }
  s.ratio_cap = one_in(2) ? kInf : 1.5f;
  s.dual_clip = one_in(2) ? kInf : 1.4f;
  s.tau_positive = 1.0f;
  s.tau_negative = 1.05f;
  s.k_positive = 2.0f;
  s.lambda_positive = 3.0f;
  s.k_negative = 3.0f;
  s.lambda_negative = 2.0f;
  s.quadratic = 0.5f;
  s.kl = static_cast<rlk::KlEstimator>(pick(5));
  s.kl_straight_through = one_in(4);
  if (s.kl_straight_through && s.level == rlk::RatioLevel::kToken && one_in(2)) s.kl_gradient_ratio = 1.1f;
  const bool may_multiply = s.surrogate != rlk::Surrogate::kGamma && s.surrogate != rlk::Surrogate::kGeometricClip;
  s.kl_times_ratio = may_multiply && one_in(3) ? rlk::kTimesRatio : 0;
  if (s.level != rlk::RatioLevel::kToken && one_in(3)) s.kl_times_ratio = rlk::kTimesOwnRatio;
  s.kl_coef = 0.1f;
  s.kl_input_limit = one_in(2) ? kInf : 0.25f;
  s.kl_limit = one_in(2) ? kInf : 0.03f;
  s.selected_kl = 0.7f;
  s.selected_drops = pick(3);
  s.entropy_coef = 0.01f;
  s.entropy_scale = 0.5f;
  s.entropy_token_mean = pick(2);
  s.importance = static_cast<rlk::ImportanceLevel>(one_in(2) ? 0 : pick(5));
  const bool merges = s.surrogate == rlk::Surrogate::kGamma || s.surrogate == rlk::Surrogate::kGeometricClip;
  if (merges && s.importance != rlk::ImportanceLevel::kNone) s.importance = rlk::ImportanceLevel::kToken;
  s.importance_of_current = pick(2);
  s.importance_mask = pick(2);
  s.importance_low = one_in(2) ? -kInf : 0.9f;
  s.importance_high = one_in(3) ? kInf : 1.2f;
  s.importance_limit = one_in(2) ? kInf : 0.3f;
  const bool rollout = s.importance != rlk::ImportanceLevel::kNone && s.importance != rlk::ImportanceLevel::kGiven;
  s.gate = rollout && one_in(3);
  s.gate_low = 0.9f;
  s.gate_high = 1.05f;
  s.drop_above = one_in(3) ? 0.01f : kInf;
  s.drop_by_rollout = rollout && one_in(2);
  s.denominator = static_cast<rlk::DenominatorKind>(pick(4));
  s.sequence_mean = pick(2);
  s.horizon = one_in(3) ? 37.0f : 0.0f;
  s.scale = one_in(2) ? 1.0f : 3.0f;
  return s;
}

// Sets the options as most configurations have them (kernels/losses/policy_plain.h).
inline void make_plain(rlk::PolicySpec* s) {
  s->level = rlk::RatioLevel::kToken;
  s->surrogate = rlk::Surrogate::kRatio;
  s->importance = rlk::ImportanceLevel::kNone;
  s->ratio_cap = s->drop_above = std::numeric_limits<float>::infinity();
  s->gate = s->drop_by_rollout = s->selected_drops = 0;
  s->kl_straight_through = s->kl_times_ratio = 0;
  s->kl_gradient_ratio = 0.0f;
}

// `sequences` of up to `longest` tokens. With plain, the sequences are padded and lengths are multiples of four.
inline void make_case(unsigned seed, std::int64_t sequences, std::int64_t longest, bool packed, Case* c,
                      bool plain = false) {
  std::mt19937 random(seed);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  rlk::PolicyLossParams& p = c->p;
  p.spec = random_spec(&random);
  if (plain) make_plain(&p.spec);
  rlk::Sequences& q = p.sequences;
  q.num_sequences = sequences;
  q.num_tokens = longest;
  if (packed) {
    std::int64_t at = 0;
    c->cuts64.push_back(0);
    for (std::int64_t s = 0; s < sequences; ++s) {
      at += pick(5) == 0 ? 0 : static_cast<std::int64_t>(random() % static_cast<unsigned long>(longest + 1));
      c->cuts64.push_back(at);
    }
    c->cuts32.assign(c->cuts64.begin(), c->cuts64.end());
    q.num_tokens = at;
    q.cu_dtype = pick(2) ? rlk::DType::kInt64 : rlk::DType::kInt32;
    q.cu_seqlens = q.cu_dtype == rlk::DType::kInt64 ? static_cast<const void*>(c->cuts64.data()) : c->cuts32.data();
  }
  const std::int64_t pad = packed ? 0 : pick(3) * (plain ? 4 : pick(4)), row = q.num_tokens + pad;
  const std::int64_t size = packed ? q.num_tokens : sequences * row;
  std::normal_distribution<float> normal;
  for (auto& array : c->arrays) array.resize(static_cast<std::size_t>(size) + 1);
  p.mask = policy_test::random_mask(nullptr, row, pick(plain ? policy_test::kPlainMaskKinds : policy_test::kMaskKinds));
  const int bytes = p.mask.bytes;
  c->mask.assign(static_cast<std::size_t>(size * bytes) + 8, 0);
  const bool wild = pick(4) == 0;
  const float width = pick(4) == 0 ? 200.0f : 1.0f;  // wide: exponentials leave the range, while products may not
  for (std::int64_t i = 0; i < size; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool counts = pick(4) != 0 && !(sequences > 2 && !packed && i / (row ? row : 1) == 1);  // one sequence has no
                                                                                                  // token that counts
    const float l = -std::fabs(normal(random)), o = l + 0.3f * width * normal(random);
    const float values[8] = {
        l,
        o,
        pick(8) == 0 ? 0.0f : normal(random),
        l + 0.2f * width * normal(random),
        p.spec.importance == rlk::ImportanceLevel::kGiven ? std::fabs(normal(random)) : o + 0.1f * normal(random),
        std::fabs(normal(random)),
        pick(5) == 0 ? 1.0f : 0.0f,
        std::fabs(normal(random))};
    for (int k = 0; k < 8; ++k) {
      constexpr float kWild[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f};
      c->arrays[k][at] = counts ? values[k] : kWild[pick(5)];
      if (counts && wild && pick(16) == 0) c->arrays[k][at] = kWild[pick(5)];
    }
    unsigned char* const to = &c->mask[at * static_cast<std::size_t>(bytes)];
    counts ? policy_test::set_flag(p.mask, pick(2), to) : policy_test::clear_flag(p.mask, pick(2), to);
  }
  p.mask.data = c->mask.data();
  rlk::PolicyTokens* const to[] = {&p.logprob,    &p.old_logprob, &p.advantage, &p.ref_logprob,
                                   &p.importance, &p.entropy,     &p.selected,  &p.token_weight};
  const bool needs_importance =
      p.spec.importance != rlk::ImportanceLevel::kNone || p.spec.drop_by_rollout || p.spec.gate;
  const bool given[] = {true,
                        pick(6) != 0,
                        true,
                        p.spec.kl != rlk::KlEstimator::kNone,
                        needs_importance,
                        pick(2) == 0 && !plain,
                        pick(3) == 0 && !plain,
                        pick(3) == 0 && !plain && p.spec.surrogate != rlk::Surrogate::kGeometricClip};
  for (int k = 0; k < 8; ++k) {
    if (!given[k]) continue;
    *to[k] = {c->arrays[k].data(), row, 1};
    const bool may_be_one = k == 2 || (k == 4 && p.spec.importance == rlk::ImportanceLevel::kGiven);
    if (may_be_one && size >= sequences && !wild && pick(3) == 0) {
      for (std::int64_t s = 0; s < sequences; ++s)
        c->arrays[k][static_cast<std::size_t>(s)] = std::fabs(normal(random)) - (k == 2);
      *to[k] = {c->arrays[k].data(), 1, 0};
    }
  }
  p.denominator_value = pick(2) ? 0.0f : 123.5f;
  c->text = "seed " + std::to_string(seed) + " [" + std::to_string(sequences) + ", " + std::to_string(q.num_tokens) +
            "]" + (packed ? " packed" : "") + " surrogate " + std::to_string(static_cast<int>(p.spec.surrogate)) +
            " level " + std::to_string(static_cast<int>(p.spec.level)) + " importance " +
            std::to_string(static_cast<int>(p.spec.importance));
}

}  // namespace policy_test
