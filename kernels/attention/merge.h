// Merges attention's partials (partials.h), or normalised parts of attention, on CUDA and HIP. A thread merges eight
// columns of a row and head over the splits, in ascending order of the split. Memory bandwidth bounds the merge.
#pragma once

#include "kernels/attention/partials.h"
#include "kernels/attention/sinks.h"

namespace rlk {

// A row's reference m, its sum of probabilities l and eight of its sums of values, merged over the splits so far.
template <class Gpu, class T>
class AttentionMergeRow {
 public:
  static constexpr int kColumns = 8;

  // `index` is the thread's index, out of rows * heads * (value_dim / 8) threads.
  RLK_DEVICE AttentionMergeRow(const AttentionMergeParams& p, std::int64_t index) : p_(p) {
    const std::int64_t vec8s = p.value_dim / kColumns;
    place_ = index / vec8s;
    column_ = static_cast<int>(index % vec8s) * kColumns;
    head_ = place_ % p.num_q_heads;
    const std::int64_t row = place_ / p.num_q_heads;
    lse_at_ = (row / p.q_tokens * p.num_q_heads + head_) * p.q_tokens + row % p.q_tokens;
  }

  RLK_DEVICE void run() {
    const std::int64_t places = p_.rows * p_.num_q_heads;
#pragma unroll 1
    for (std::int64_t s = 0; s < p_.num_splits; ++s) {
      const std::int64_t split = p_.order[s];
      p_.outs != nullptr ? add_part(split * places) : add_partial(split * places);
    }
    finish();
  }

 private:
  RLK_DEVICE void add_partial(std::int64_t first) {
    const std::int64_t at = first + place_;
    const float m = in_memory(p_.stats)[2 * at], l = in_memory(p_.stats)[2 * at + 1];
    sees_ = sees_ || attention_partial_sees(m, l);
    if (m == -infinity()) return;
    const auto* from = in_memory(p_.sums) + at * p_.value_dim + column_;
    float sums[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] = from[i];
    add(m, l, sums);
  }
  RLK_DEVICE void add_part(std::int64_t first) {
    const float lse = in_memory(p_.lses)[first + lse_at_];
    sees_ = sees_ || lse != -infinity();
    const AttentionSink node = attention_node<Gpu>(lse, p_.exp);
    if (node.m == -infinity()) return;
    const auto* from =
        in_memory(static_cast<const typename T::Storage*>(p_.outs)) + (first + place_) * p_.value_dim + column_;
    float sums[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] = mul_rn(T::load(from[i]), node.l);
    add(node.m, node.l, sums);
  }
  RLK_DEVICE void add(float m, float l, const float (&sums)[kColumns]) {
    const AttentionMerge merge(m_, m);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums_[i] = merge(sums_[i], sums[i]);
    l_ = merge(l_, l);
    m_ = merge.m;
  }

  RLK_DEVICE void finish() {
    if (sees_ && p_.sinks != nullptr) {
      const AttentionMerge merge = attention_node<Gpu>(in_memory(p_.sinks)[head_], p_.exp).into(&m_, &l_);
#pragma unroll
      for (float& sum : sums_) sum = merge(sum, 0.0f);
    }
    const bool fails = attention_merge_fails(m_, sees_);
    const float inverse = fails ? canonical_nan() : div_rn(1.0f, sees_ ? l_ : 1.0f);
    auto* to = in_memory(static_cast<typename T::Storage*>(p_.out)) + place_ * p_.value_dim + column_;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      to[i] = T::store(fails ? canonical_nan() : sees_ ? attention_output(sums_[i], inverse) : 0.0f);
    }
    if (column_ != 0 || p_.lse == nullptr) return;
    in_memory(p_.lse)[lse_at_] = fails ? canonical_nan() : sees_ ? attention_lse(m_, l_) : -infinity();
  }

  const AttentionMergeParams& p_;
  std::int64_t place_, head_, lse_at_;
  int column_;
  bool sees_ = false;
  float m_ = -infinity(), l_ = 0.0f, sums_[kColumns] = {};
};
inline std::int64_t attention_merge_threads(const AttentionMergeParams& p) {
  return p.rows * p.num_q_heads * (p.value_dim / 8);
}

}  // namespace rlk
