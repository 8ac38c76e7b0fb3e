// The sink of a query head, for every backend. A sink is one more logit in the softmax of each row of the head, without
// a value. The forward merges the sink into a row like one more split. The backward sums the sink's gradient over the
// rows of q. Gpu supplies the hardware's exponential, thread indices and barriers.
#pragma once

#include "kernels/attention/row.h"
#include "kernels/attention/tile.h"
#include "rlk/math/softmax_stats.h"

namespace rlk {

// Computes 2^t in the backward, with the exponential that the call selects.
template <class Gpu>
RLK_DEVICE float attention_probability(float t, Exp exp) {
  const float p = Gpu::kHasHardwareExp && exp == Exp::kHardware
                      ? Gpu::ex2(t)
                      : PortableProbability::of(t > 127.0f ? 127.0f : t);  // a NaN stays a NaN
  return is_nan(t) ? canonical_nan() : p;
}

// A sink in the form of a split: a reference m (row.h) and a sum of probabilities l. All sums of values are 0. m is
// -Inf if the sink contributes nothing, and NaN if it makes its rows NaN.
struct AttentionSink {
  float m = -infinity(), l = 0.0f;

  // Merges the sink into a row's l and m, after the row's last split. The caller must also merge 0 into each of the
  // row's sums, by the merge that this function returns.
  RLK_HD AttentionMerge into(float* row_m, float* row_l) const {
    const AttentionMerge merge(*row_m, m);
    *row_l = merge(*row_l, l);
    *row_m = merge.m;
    return merge;
  }
};
// Turns a natural logarithm into the form of a split. The logarithm is a sink, or the lse of a normalised part.
template <class Gpu>
RLK_DEVICE AttentionSink attention_node(float logarithm, Exp exp) {
  const float u = mul_rn(kLog2e, logarithm);
  AttentionSink node;
  SoftmaxStats failed;
  const LeafReference r = leaf_reference(kLog2e, logarithm, &failed);
  if (r.usable) {
    node.m = r.m;
    node.l = Gpu::kHasHardwareExp && exp == Exp::kHardware ? Gpu::ex2(sub_rn(u, r.m))
                                                           : stat_exp_portable(u, 1.0f, sub_rn(kStatsShift, r.m));
  } else if (is_nan(failed.m)) {
    node.m = canonical_nan();
  }
  return node;
}
template <class Gpu>
RLK_DEVICE AttentionSink attention_sink(const AttentionInput& p, std::int64_t head) {
  return attention_node<Gpu>(in_memory(p.sinks)[head], p.exp);
}

// A query by its index in q, counted over all sequences.
struct AttentionQuery {
  std::int64_t sequence, token;  // token: index among all tokens of q if it is packed, else in the sequence
  AttentionRange sees = {0, 0};  // range of keys that the query sees; empty if the query is unused

  template <class Params>
  RLK_HD AttentionQuery(const Params& p, std::int64_t place) {
    if (p.cu_seqlens_q != nullptr) {
      sequence = sequence_of(p.cu_seqlens_q, p.num_sequences, place);
      token = place;
      if (sequence >= p.num_sequences || in_memory(p.cu_seqlens_q)[sequence] > token) return;
    } else {
      sequence = place / p.q_tokens;
      token = place % p.q_tokens;
    }
    const AttentionSpan span(p, sequence);
    const std::int64_t i = token - span.q_first;
    if (i < span.num_queries) sees = kMayBePartial<Params> ? span.here(span.keys_of(i)) : span.keys_of(i);
  }
  RLK_HD bool used() const { return !sees.empty(); }
};

constexpr int kSinkGroupRows = 64, kSinkGroups = 128;  // rows per group; groups per block of 8192 rows

// Sums p * delta in ascending order over a group of rows of q. The array `delta` has the layout of lse.
template <class Gpu>
RLK_DEVICE float attention_sink_group(const AttentionBackwardParams& p, const float* delta, std::int64_t rows,
                                      std::int64_t head, std::int64_t group) {
  const float u = mul_rn(kLog2e, in_memory(p.sinks)[head]);
  const std::int64_t begin = group * kSinkGroupRows;
  float sum = 0.0f;
  for (std::int64_t row = begin; row < begin + kSinkGroupRows && row < rows; ++row) {
    const AttentionQuery query(p, row);
    if (!query.used()) continue;
    const std::int64_t at = lse_index(p, query.sequence, query.token, head);
    const float t = fma_rn(in_memory(p.lse)[at], -kLog2e, u);
    sum = fma_rn(attention_probability<Gpu>(t, p.exp), in_memory(delta)[at], sum);
  }
  return sum;
}

// A block of threads computes dsinks of a head. `sums` is an array of kSinkGroups floats that all threads share. The
// block may be a single thread.
template <class Gpu>
RLK_DEVICE void attention_sink_gradient(const AttentionBackwardParams& p, const float* delta, std::int64_t rows,
                                        std::int64_t head, float* sums) {
  const std::int64_t groups = (rows + kSinkGroupRows - 1) / kSinkGroupRows;
  const int thread = Gpu::thread(), threads = Gpu::threads();
  float total = 0.0f;
  for (std::int64_t first = 0; first < groups; first += kSinkGroups) {
    for (int i = thread; i < kSinkGroups; i += threads) {
      sums[i] = first + i < groups ? attention_sink_group<Gpu>(p, delta, rows, head, first + i) : 0.0f;
    }
    for (int distance = 1; distance < kSinkGroups; distance *= 2) {
      Gpu::barrier();
      for (int i = thread * 2 * distance; i < kSinkGroups; i += threads * 2 * distance) {
        sums[i] = add_rn(sums[i], sums[i + distance]);
      }
    }
    Gpu::barrier();
    total = first == 0 ? sums[0] : add_rn(total, sums[0]);
    Gpu::barrier();  // the next iteration overwrites `sums`
  }
  if (thread != 0) return;
  const float gradient = sub_rn(0.0f, total);
  in_memory(p.dsinks)[head] = is_nan(gradient) ? canonical_nan() : gradient;
}

}  // namespace rlk
