// Formulas of ops/optimal_token_baseline.h that every backend shares, and checks of memory safety.
#pragma once

#include "kernels/losses/policy_check.h"
#include "rlk/math/exp.h"
#include "rlk/ops/optimal_token_baseline.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr int kBaselineChunk = 256;

inline void check_optimal_token_baseline(const OptimalTokenBaselineParams& p) {
  const Sequences& q = p.sequences;
  check_sequences(q, p.mask, "optimal_token_baseline");
  RLK_CHECK(p.group_dtype == DType::kInt32 || p.group_dtype == DType::kInt64,
            "optimal_token_baseline: group_offsets are int32 or int64");
  RLK_CHECK(p.num_groups >= 0 && p.num_groups < std::int64_t{1} << 31,
            "optimal_token_baseline: fewer than 2^31 groups");
  RLK_CHECK(p.group_offsets != nullptr || p.num_groups * p.group_size == q.num_sequences,
            "optimal_token_baseline: groups have all sequences");
  RLK_CHECK(p.eps > 0.0f, "optimal_token_baseline: eps is positive");
  if (q.num_slots() == 0) return;
  RLK_CHECK(p.rewards.data != nullptr || q.num_sequences == 0, "optimal_token_baseline: rewards are given");
  RLK_CHECK(p.logprob.data && p.logprob.token_stride == 1, "optimal_token_baseline: logprob, one a token");
  RLK_CHECK(p.sum_p_sq.data && p.sum_p_sq.token_stride == 1, "optimal_token_baseline: sum_p_sq, one a token");
  RLK_CHECK(p.advantages != nullptr && p.returns != nullptr,
            "optimal_token_baseline: advantages and returns are given");
}

// The weight w of a token, of which the contract's W is the sum over a sequence's tokens so far.
template <class F>
RLK_HD F baseline_weight(F logprob, F sum_p_sq) {
  const F zero = broadcast<F>(0.0f), p = exp(logprob);
  const F w = add_rn(sub_rn(broadcast<F>(1.0f), add_rn(p, p)), sum_p_sq);
  return select(w <= zero, zero, w);
}
template <class F>
RLK_HD F weighted_by(F w, F importance) {
  return mul_rn(w, mul_rn(importance, importance));
}

// Marks a masked token in the array of sums W. A sum W is never negative.
constexpr float kNoWeight = -1.0f;

// The sequences of a group.
RLK_HD OffsetRange group_of(const OptimalTokenBaselineParams& p, std::int64_t g) {
  if (p.group_offsets == nullptr) return {g * p.group_size, (g + 1) * p.group_size};
  return range_of({p.group_offsets, p.group_dtype}, g, p.sequences.num_sequences);
}

// Finds the positions of a group's longest sequence at which no other sequence has a token. These positions have no
// baseline. Call add() for each sequence in ascending order.
struct BaselineTail {
  std::int64_t sequence = -1, longest = -1, second = -1;
  RLK_HD void add(std::int64_t s, std::int64_t tokens) {
    if (tokens > longest) {
      second = longest;
      longest = tokens;
      sequence = s;
    } else if (tokens > second) {
      second = tokens;
    }
  }
  RLK_HD bool has(std::int64_t s, std::int64_t position) const { return is_of(s) && position >= second; }
  RLK_HD bool is_of(std::int64_t s) const { return s == sequence && longest > second; }
};

template <class F>
RLK_HD F finite_or_canonical(F x) {
  return select(is_nan(x), broadcast<F>(canonical_nan()), x);
}

}  // namespace rlk
