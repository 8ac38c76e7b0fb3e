// CPU backend of the operator `attention_merge`. It merges one row of one head at a time, with columns in lanes.
#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_tiles.h"
#include "float_environment.h"
#include "kernels/attention/check.h"
#include "kernels/attention/partials.h"
#include "kernels/attention/sinks.h"
#include "rlk/backends.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

class Merge {
 public:
  explicit Merge(const AttentionMergeParams& p)
      : p_(p), columns_((p.value_dim + kColumns - 1) / kColumns * kColumns), total_(columns_), of_split_(columns_) {}

  // Merges one row of one head; `place` is row * heads + head.
  void run(std::int64_t place) {
    const std::int64_t head = place % p_.num_q_heads, row = place / p_.num_q_heads;
    const std::int64_t lse_at =
        (row / p_.q_tokens * p_.num_q_heads + head) * p_.q_tokens + row % p_.q_tokens;  // index in lse's layout
    float m = -infinity(), l = 0.0f;
    bool sees = false;
    for (std::int64_t s = 0; s < p_.num_splits; ++s) {
      const std::int64_t at = p_.order[s] * p_.rows * p_.num_q_heads + place;
      const AttentionSink node =
          p_.outs != nullptr ? part(p_.order[s] * p_.rows * p_.num_q_heads + lse_at, &sees) : partial(at, &sees);
      const AttentionMerge merge(m, node.m);
      if (!merge.only_before) add(merge, at, node.l);
      l = merge(l, node.l);
      m = merge.m;
    }
    finish(place, head, lse_at, m, l, sees);
  }

 private:
  AttentionSink partial(std::int64_t at, bool* sees) const {
    const float m = p_.stats[2 * at], l = p_.stats[2 * at + 1];
    *sees |= attention_partial_sees(m, l);
    return {m, l};
  }
  AttentionSink part(std::int64_t at, bool* sees) const {
    *sees |= p_.lses[at] != -infinity();
    return attention_node<Sm90Exp>(p_.lses[at], p_.exp);
  }
  void add(const AttentionMerge& merge, std::int64_t at, float l) {
    const AttentionLanes& lanes = attention_simd();
    if (p_.outs != nullptr) {
      const auto* from = static_cast<const unsigned char*>(p_.outs) + at * p_.value_dim * size_of(p_.dtype);
      lanes.load(from, p_.dtype, p_.value_dim, columns_, of_split_.data());
      lanes.scale(of_split_.data(), columns_, l);
    } else {
      lanes.load(reinterpret_cast<const unsigned char*>(p_.sums + at * p_.value_dim), DType::kFloat32, p_.value_dim,
                 columns_, of_split_.data());
    }
    if (merge.only_split) {
      total_.swap(of_split_);
    } else {
      lanes.merge(total_.data(), of_split_.data(), columns_, merge.factor, merge.factor_of_split);
    }
  }
  void finish(std::int64_t place, std::int64_t head, std::int64_t lse_at, float m, float l, bool sees) {
    if (sees && p_.sinks != nullptr) {
      const AttentionMerge merge = attention_node<Sm90Exp>(p_.sinks[head], p_.exp).into(&m, &l);
      for (float& sum : total_) sum = merge(sum, 0.0f);
    }
    const bool fails = attention_merge_fails(m, sees);
    const float inverse = div_rn(1.0f, l);
    for (float& sum : total_) sum = fails ? canonical_nan() : sees ? attention_output(sum, inverse) : 0.0f;
    attention_simd().store(total_.data(), p_.value_dim, p_.dtype,
                           static_cast<unsigned char*>(p_.out) + place * p_.value_dim * size_of(p_.dtype));
    if (p_.lse != nullptr) p_.lse[lse_at] = fails ? canonical_nan() : sees ? attention_lse(m, l) : -infinity();
  }

  const AttentionMergeParams& p_;
  std::int64_t columns_;  // columns per row, in floats
  std::vector<float> total_, of_split_;
};

}  // namespace

void attention_merge(const AttentionMergeParams& p) {
  check_attention(p);
  constexpr std::int64_t kGrain = 64;  // rows per task: some microseconds
  parallel_for(p.rows * p.num_q_heads, kGrain, [&](std::int64_t begin, std::int64_t end) {
    const FloatEnvironment environment;
    Merge merge(p);
    for (std::int64_t i = begin; i < end; ++i) merge.run(i);
  });
}

}  // namespace rlk::cpu
