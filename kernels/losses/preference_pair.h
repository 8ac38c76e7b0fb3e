// The formulas of preference_loss for one pair, for the CPU, CUDA and HIP.
#pragma once

#include "kernels/advantages/merge_order.h"
#include "kernels/tokens/terms.h"
#include "rlk/math/exp.h"
#include "rlk/math/expm1.h"
#include "rlk/math/log2.h"
#include "rlk/math/sigmoid.h"
#include "rlk/math/tree_sum.h"
#include "rlk/ops/preference_loss.h"
#include "rlk/tokens.h"

namespace rlk {

RLK_HD float one_nan(float x) { return is_nan(x) ? canonical_nan() : x; }

// An answer on the chosen or on the rejected side. The contract in ops/preference_loss.h defines x, the score s, its
// derivative h, and n.
struct PreferenceElement {
  float policy, x, s, h, n, aligned;
  bool empty;  // the answer's number of tokens is below 1
};

template <class Memory>
RLK_HD float preference_ratio(const PreferenceSide& side, std::int64_t i) {
  const float policy = Memory::global(side.policy)[i * side.policy_stride];
  if (side.reference == nullptr) return policy;
  return sub_rn(policy, Memory::global(side.reference)[i * side.reference_stride]);
}

template <class Memory>
RLK_HD PreferenceElement preference_element(const PreferenceLossParams& p, const PreferenceSide& side, std::int64_t i) {
  PreferenceElement e;
  e.policy = Memory::global(side.policy)[i * side.policy_stride];
  e.n = 1.0f;
  e.empty = false;
  if (side.count != nullptr) {
    const std::int64_t count = Memory::global(side.count)[i * side.count_stride];
    e.empty = count < 1;
    e.n = static_cast<float>(count > 1 ? count : 1);
  }
  e.x = preference_ratio<Memory>(side, i);
  if (p.average == PreferenceAverage::kLogprob) e.x = div_rn(e.x, e.n);
  e.s = e.x;
  e.h = 1.0f;
  if (p.score == PreferenceScore::kForwardKl) {
    e.h = exp(-e.x);
    e.s = -expm1(-e.x);
  } else if (p.score == PreferenceScore::kJsDivergence) {
    e.s = add_rn(kLn2, logsigmoid(e.x));
    e.h = sigmoid(-e.x);
  } else if (p.score == PreferenceScore::kAlphaDivergence) {
    const float c = sub_rn(p.alpha, 1.0f), t = mul_rn(c, e.x);
    const bool cut = t > 80.0f;
    e.s = div_rn(expm1(cut ? 80.0f : t), c);
    e.h = cut ? 0.0f : exp(t);
  } else if (p.score == PreferenceScore::kAlphaPo) {
    const float t = mul_rn(-p.alpha, e.x);
    e.s = div_rn(-expm1(t), p.alpha);
    e.h = exp(t);
  }
  if (p.average == PreferenceAverage::kScore) e.s = div_rn(e.s, e.n);
  if (p.average != PreferenceAverage::kNone) e.h = div_rn(e.h, e.n);
  e.aligned = 0.0f;
  if (side.aligned != nullptr) {
    e.aligned = Memory::global(side.aligned)[i * side.aligned_stride];
    if (side.count != nullptr) e.aligned = div_rn(e.aligned, e.n);
  }
  return e;
}

RLK_HD float preference_reward(const PreferenceLossParams& p, const PreferenceElement& e) {
  return one_nan(mul_rn(p.beta, p.score == PreferenceScore::kAlphaPo ? e.s : e.x));
}

RLK_HD float log1mexp(float v) { return v > -kLn2 ? mul_rn(kLn2, log2(-expm1(v))) : log1p(-exp(v)); }

struct PreferenceValue {
  float loss, g_w, g_l;  // derivatives with respect to the scores
};

// The loss kSigmoid as a function of z = beta * delta.
RLK_HD PreferenceValue preference_sigmoid(const PreferenceLossParams& p, float z) {
  const float e = p.label_smoothing, k = sub_rn(1.0f, e);
  float loss = -mul_rn(k, logsigmoid(z)), dz = -mul_rn(k, sigmoid(-z));
  if (e != 0.0f) {
    loss = sub_rn(loss, mul_rn(e, logsigmoid(-z)));
    dz = sub_rn(mul_rn(e, sigmoid(z)), mul_rn(k, sigmoid(-z)));
  }
  const float g = mul_rn(p.beta, dz);
  return {loss, g, -g};
}

// The loss kOrpo (ORPO). The slopes are computed from 1 - e^v, which is 1 minus a probability. The inverse of 1 - e^v
// could overflow although the slopes do not.
RLK_HD PreferenceValue preference_orpo(const PreferenceLossParams& p, const PreferenceElement& chosen,
                                       const PreferenceElement& rejected) {
  if (chosen.empty || rejected.empty) return {0.0f, 0.0f, 0.0f};
  const float w = chosen.s, l = rejected.s, left_w = -expm1(w), left_l = -expm1(l);
  const bool certain = left_w == 0.0f && left_l == 0.0f;
  const float z = certain ? 0.0f : sub_rn(sub_rn(w, l), sub_rn(log1mexp(w), log1mexp(l)));
  const float loss = -mul_rn(p.beta, logsigmoid(z));
  if (is_nan(loss)) return {loss, loss, loss};
  if (certain) return {loss, 0.0f, 0.0f};
  const float g = div_rn(p.beta, fma_rn(exp(sub_rn(w, l)), left_l, left_w));
  return {loss, -g, scaled_by(g, div_rn(left_w, left_l))};
}

// fl(s_w - s_l), where w is the chosen and l the rejected answer. If both scores are the same infinity, the result is
// an infinity with the sign of x_w - x_l, or 0 if the two x are equal.
RLK_HD float score_difference(const PreferenceElement& chosen, const PreferenceElement& rejected) {
  const float difference = sub_rn(chosen.s, rejected.s);
  if (!is_nan(difference) || !(chosen.s == rejected.s)) return difference;
  const float of_x = sub_rn(chosen.x, rejected.x);
  return of_x == 0.0f ? 0.0f : mul_rn(of_x, infinity());
}

RLK_HD PreferenceValue preference_value(const PreferenceLossParams& p, const PreferenceElement& chosen,
                                        const PreferenceElement& rejected) {
  if (p.kind == Preference::kOrpo) return preference_orpo(p, chosen, rejected);
  const float s_w = chosen.s, s_l = rejected.s;
  const float delta = sub_rn(score_difference(chosen, rejected), p.margin), z = mul_rn(p.beta, delta);
  const float c = mul_rn(p.beta, s_w), r = mul_rn(p.beta, s_l), e = p.label_smoothing, k = sub_rn(1.0f, e);
  const auto of_z = [&](float loss, float dz) {
    const float g = mul_rn(p.beta, dz);
    return PreferenceValue{loss, g, -g};
  };
  const auto of_sides = [&](float loss, float dc, float dr) {
    return PreferenceValue{loss, mul_rn(p.beta, dc), mul_rn(p.beta, dr)};
  };
  switch (p.kind) {
    case Preference::kHinge: {
      const float gap = sub_rn(1.0f, z);
      if (is_nan(gap)) return {gap, gap, gap};
      return of_z(gap > 0.0f ? gap : 0.0f, gap > 0.0f ? -1.0f : 0.0f);
    }
    case Preference::kIpo: {
      const float d = sub_rn(delta, p.half), g = mul_rn(2.0f, d);
      return {mul_rn(d, d), g, -g};
    }
    case Preference::kExoPair: {
      const float w = sigmoid(z), l = sigmoid(-z);
      const float a = sub_rn(logsigmoid(z), p.log_keep), b = sub_rn(logsigmoid(-z), p.log_flip);
      return of_z(add_rn(scaled_by(w, a), scaled_by(l, b)), scaled_by(mul_rn(w, l), sub_rn(a, b)));
    }
    case Preference::kNcaPair:
      return of_sides(sub_rn(sub_rn(-logsigmoid(c), mul_rn(0.5f, logsigmoid(-c))), mul_rn(0.5f, logsigmoid(-r))),
                      sub_rn(mul_rn(0.5f, sigmoid(c)), sigmoid(-c)), mul_rn(0.5f, sigmoid(r)));
    case Preference::kRobust: {
      float loss = -mul_rn(k, logsigmoid(z)), dz = -mul_rn(k, sigmoid(-z));
      if (e != 0.0f) {
        loss = add_rn(loss, mul_rn(e, logsigmoid(-z)));
        dz = sub_rn(dz, mul_rn(e, sigmoid(z)));
      }
      return of_z(div_rn(loss, p.unflipped), div_rn(dz, p.unflipped));
    }
    case Preference::kBcoPair:
      return of_sides(sub_rn(-logsigmoid(c), logsigmoid(-r)), -sigmoid(-c), sigmoid(r));
    case Preference::kSppoHard: {
      const float w = sub_rn(s_w, p.half), l = add_rn(s_l, p.half);
      return {add_rn(mul_rn(w, w), mul_rn(l, l)), mul_rn(2.0f, w), mul_rn(2.0f, l)};
    }
    case Preference::kApoZero:
      return of_sides(add_rn(sigmoid(-c), sigmoid(r)), -mul_rn(sigmoid(c), sigmoid(-c)),
                      mul_rn(sigmoid(r), sigmoid(-r)));
    case Preference::kApoDown: {
      const float dc = mul_rn(sigmoid(c), sigmoid(-c)), dz = -mul_rn(sigmoid(z), sigmoid(-z));
      return {add_rn(sigmoid(c), sigmoid(-z)), mul_rn(p.beta, add_rn(dc, dz)), mul_rn(p.beta, -dz)};
    }
    case Preference::kDiscopop: {
      const float q = div_rn(z, p.tau), m = sigmoid(q), o = sigmoid(-q), log_p = logsigmoid(z);
      // e^-z * m by one exponential, because either factor alone may be 0 or Inf
      const float grown = z == -infinity() ? 0.0f : exp(sub_rn(logsigmoid(q), z));
      const float of_m = add_rn(scaled_by(log_p, m), grown);
      float slope = add_rn(sub_rn(-mul_rn(sigmoid(-z), o), grown), scaled_by(of_m, div_rn(o, p.tau)));
      if (grown == infinity()) slope = mul_rn(grown, sub_rn(div_rn(o, p.tau), 1.0f));
      return of_z(add_rn(-scaled_by(log_p, o), grown), slope);
    }
    default:
      return preference_sigmoid(p, z);
  }
}

// Computes the loss of pair i. If the loss sorts its inputs, the function computes the i-th loss in sorted order.
template <class Memory>
RLK_HD void preference_pair(const PreferenceLossParams& p, std::int64_t i) {
  const PreferenceElement w = preference_element<Memory>(p, p.chosen, i);
  const PreferenceElement l = preference_element<Memory>(p, p.rejected, i);
  Memory::global(p.chosen.reward)[i] = preference_reward(p, w);
  Memory::global(p.rejected.reward)[i] = preference_reward(p, l);
  if (p.sort != PreferenceSort::kNone) {
    const std::int64_t a = Memory::global(p.order)[i], b = Memory::global(p.order)[p.chosen.num + i];
    float first, second;
    const auto difference = [](const float* x, std::int64_t x_stride, const float* y, std::int64_t y_stride,
                               std::int64_t at) {
      return sub_rn(Memory::global(x)[at * x_stride], Memory::global(y)[at * y_stride]);
    };
    const bool unpaired = p.sort == PreferenceSort::kAotUnpaired;
    if (unpaired) {
      first = preference_ratio<Memory>(p.chosen, a);
      second = preference_ratio<Memory>(p.rejected, b);
    } else {
      first = difference(p.chosen.policy, p.chosen.policy_stride, p.rejected.policy, p.rejected.policy_stride, a);
      second = difference(p.chosen.reference, p.chosen.reference_stride, p.rejected.reference,
                          p.rejected.reference_stride, b);
    }
    const PreferenceValue value = preference_sigmoid(p, mul_rn(p.beta, sub_rn(sub_rn(first, second), p.margin)));
    Memory::global(p.losses)[i] = one_nan(value.loss);
    Memory::global(p.chosen.d_policy)[a] = one_nan(value.g_w);
    Memory::global(p.rejected.d_policy)[unpaired ? b : a] = one_nan(value.g_l);
    return;
  }
  const PreferenceValue value = preference_value(p, w, l);
  float loss = value.loss, d_w = scaled_by(value.g_w, w.h), d_l = scaled_by(value.g_l, l.h);
  if (p.chosen.aligned != nullptr) {
    const float weight = exp(add_rn(w.aligned, l.aligned));
    loss = scaled_by(loss, weight);
    d_w = scaled_by(d_w, weight);
    d_l = scaled_by(d_l, weight);
  }
  if (p.nll_weight != 0.0f) {
    const bool averages = p.chosen.count != nullptr;
    loss = sub_rn(loss, mul_rn(p.nll_weight, averages ? div_rn(w.policy, w.n) : w.policy));
    d_w = sub_rn(d_w, averages ? div_rn(p.nll_weight, w.n) : p.nll_weight);
  }
  Memory::global(p.losses)[i] = one_nan(loss);
  Memory::global(p.chosen.d_policy)[i] = one_nan(d_w);
  Memory::global(p.rejected.d_policy)[i] = one_nan(d_l);
}

// Computes answer i for the loss kKto. The chosen answers precede the rejected answers.
template <class Memory>
RLK_HD void preference_unpaired(const PreferenceLossParams& p, std::int64_t i) {
  const bool rejected = i >= p.chosen.num;
  const PreferenceSide& side = rejected ? p.rejected : p.chosen;
  const std::int64_t at = rejected ? i - p.chosen.num : i;
  const PreferenceElement e = preference_element<Memory>(p, side, at);
  const float kl = p.kl == nullptr ? 0.0f : Memory::global(p.kl)[0];
  const float floor = kl < 0.0f ? 0.0f : kl;
  const float v = mul_rn(p.beta, rejected ? sub_rn(floor, e.s) : sub_rn(e.s, floor));
  const float weight = rejected ? p.rejected_weight : p.chosen_weight;
  const float slope = mul_rn(p.beta, mul_rn(sigmoid(v), sigmoid(-v)));
  const float g = scaled_by(rejected ? slope : -slope, e.h);
  Memory::global(side.reward)[at] = preference_reward(p, e);
  Memory::global(p.losses)[i] = one_nan(mul_rn(sigmoid(-v), weight));
  Memory::global(side.d_policy)[at] = one_nan(mul_rn(g, weight));
}

RLK_HD std::int64_t preference_losses(const PreferenceLossParams& p) {
  return p.kind == Preference::kKto ? p.chosen.num + p.rejected.num : p.chosen.num;
}
template <class Memory>
RLK_HD void preference_item(const PreferenceLossParams& p, std::int64_t i) {
  p.kind == Preference::kKto ? preference_unpaired<Memory>(p, i) : preference_pair<Memory>(p, i);
}

// The keys of the two arrays that are sorted. For kAotUnpaired, which = 0 gives keys of the chosen side, and which = 1
// those of the rejected side. For the other sort, which = 0 gives keys of the policy, and which = 1 those of the
// reference.
template <class Memory>
RLK_HD float preference_key(const PreferenceLossParams& p, int which, std::int64_t i) {
  if (p.sort == PreferenceSort::kAotUnpaired) {
    return preference_ratio<Memory>(which == 0 ? p.chosen : p.rejected, i);
  }
  const PreferenceSide &w = p.chosen, &l = p.rejected;
  if (which == 0) {
    return sub_rn(Memory::global(w.policy)[i * w.policy_stride], Memory::global(l.policy)[i * l.policy_stride]);
  }
  return sub_rn(Memory::global(w.reference)[i * w.reference_stride],
                Memory::global(l.reference)[i * l.reference_stride]);
}
RLK_HD bool preference_before(float a, std::int64_t i, float b, std::int64_t j) {
  if (is_nan(a) || is_nan(b)) return is_nan(a) && is_nan(b) ? i < j : is_nan(b);
  return a < b || (a == b && i < j);
}
// A key as an integer for the sort of kernels/advantages/merge_order.h. Equal floats have equal keys, and NaN comes
// last.
template <class Memory>
RLK_HD std::int64_t preference_order_key(const PreferenceLossParams& p, int which, std::int64_t i) {
  const float key = preference_key<Memory>(p, which, i);
  if (is_nan(key)) return std::int64_t{1} << 40;
  const auto bits = static_cast<std::int32_t>(bits_of(key) & 0x7fffffffu);
  return key < 0.0f ? -std::int64_t{bits} : bits;
}
// The sort uses two arrays of indices [2, num], and leaves the order in the second array. Afterwards the first array
// receives ranks. The function returns row `which` of the first or of the second array.
RLK_HD std::int32_t* preference_indices(const PreferenceLossParams& p, int which, bool first) {
  return (first ? p.ranks : p.order) + which * p.chosen.num;
}
// In a launch that sorts both rows of indices: the row of a block, and the block's index in that row.
struct PreferenceHalf {
  int which;
  std::int32_t block;
  RLK_HD PreferenceHalf(std::int64_t block_of_both, std::int64_t blocks_of_one)
      : which(block_of_both < blocks_of_one ? 0 : 1),
        block(static_cast<std::int32_t>(which == 0 ? block_of_both : block_of_both - blocks_of_one)) {}
};
template <class Memory, class Barrier, class WarpBarrier>
RLK_HD void preference_order_run(const PreferenceLossParams& p, const PreferenceHalf& half, bool first, int thread,
                                 OrderShared& shared, const Barrier& barrier, const WarpBarrier& warp_barrier) {
  order_run<Memory>([&](std::int64_t i) { return preference_order_key<Memory>(p, half.which, i); },
                    static_cast<std::int32_t>(p.chosen.num), half.block, thread, shared,
                    preference_indices(p, half.which, first), barrier, warp_barrier);
}
template <class Memory>
RLK_HD void preference_merge(const PreferenceLossParams& p, int which, std::int32_t at, std::int32_t run,
                             bool from_first) {
  merge_index<Memory>([&](std::int64_t i) { return preference_order_key<Memory>(p, which, i); },
                      static_cast<std::int32_t>(p.chosen.num), run, at, preference_indices(p, which, from_first),
                      preference_indices(p, which, !from_first));
}
// After the sort, writes the ranks of the two elements that are at place i of the sorted rows.
template <class Memory>
RLK_HD void preference_ranks(const PreferenceLossParams& p, std::int64_t i) {
  for (int which = 0; which < 2; ++which) {
    const std::int64_t first = which * p.chosen.num;
    Memory::global(p.ranks)[first + Memory::global(p.order)[first + i]] = static_cast<std::int32_t>(i);
  }
}

// preference_metric_items gives the number of values whose mean is a metric. preference_metric_item gives value i.
RLK_HD std::int64_t preference_metric_items(const PreferenceLossParams& p, int metric) {
  if (metric == 0) return preference_losses(p);
  if (metric == 2) return p.rejected.num;
  return metric > 2 && p.kind == Preference::kKto ? 0 : p.chosen.num;
}
template <class Memory>
RLK_HD float preference_metric_item(const PreferenceLossParams& p, int metric, std::int64_t i) {
  if (metric == 0) return Memory::global(p.losses)[i];
  if (metric == 1) return Memory::global(p.chosen.reward)[i];
  if (metric == 2) return Memory::global(p.rejected.reward)[i];
  const float w = Memory::global(p.chosen.reward)[i], l = Memory::global(p.rejected.reward)[i];
  return metric == 3 ? sub_rn(w, l) : w > l ? 1.0f : 0.0f;
}
RLK_HD float preference_mean(const PreferenceLossParams& p, int metric, float sum) {
  const std::int64_t num = preference_metric_items(p, metric);
  return num == 0 ? 0.0f : div_rn(sum, static_cast<float>(num));
}
// Computes the metrics from their five sums.
template <class Memory>
RLK_HD void preference_metrics(const PreferenceLossParams& p, const float* sums) {
  float means[kPreferenceMetrics];
  for (int m = 0; m < kPreferenceMetrics; ++m) means[m] = preference_mean(p, m, sums[m]);
  if (p.kind == Preference::kKto) {
    means[3] = sub_rn(means[1], means[2]);
    means[4] = canonical_nan();
  }
  for (int m = 0; m < kPreferenceMetrics; ++m) Memory::global(p.metrics)[m] = one_nan(means[m]);
}

// A block of 256 threads computes the sums of the metrics. Each thread adds 8 consecutive items at a time. `nodes` is
// an array of 256 floats in shared memory. barrier() synchronises the block.
constexpr int kPreferenceMetricThreads = 256;
template <class Memory, class Barrier>
RLK_HD void preference_metrics_block(const PreferenceLossParams& p, int thread, float* nodes, const Barrier& barrier) {
  constexpr int kEach = 8, kChunk = kEach * kPreferenceMetricThreads;
  float sums[kPreferenceMetrics];
  for (int m = 0; m < kPreferenceMetrics; ++m) {
    const std::int64_t num = preference_metric_items(p, m);
    SumTree<kSequenceLevels> tree;
    for (std::int64_t chunk = 0; chunk < num; chunk += kChunk) {
      SumTree<4> mine;
      for (int k = 0; k < kEach; ++k) {
        const std::int64_t i = chunk + kEach * thread + k;
        mine.take(i < num ? preference_metric_item<Memory>(p, m, i) : 0.0f);
      }
      nodes[thread] = mine.finish();
      barrier();
      for (int distance = 1; distance < kPreferenceMetricThreads; distance *= 2) {
        if (thread % (2 * distance) == 0) nodes[thread] = add_rn(nodes[thread], nodes[thread + distance]);
        barrier();
      }
      tree.take(nodes[0]);
      barrier();
    }
    sums[m] = finished_sum(tree.finish());
  }
  if (thread == 0) preference_metrics<Memory>(p, sums);
}

// Computes one element of the gradient. Elements of the chosen side precede elements of the rejected side.
template <class Memory>
RLK_HD void preference_gradient(const PreferenceLossBackwardParams& p, std::int64_t item) {
  const PreferenceGradient& side = item < p.chosen.num ? p.chosen : p.rejected;
  const std::int64_t i = item < p.chosen.num ? item : item - p.chosen.num;
  if (side.d == nullptr) return;
  const std::int64_t at = side.rank == nullptr ? side.first + i : Memory::global(side.rank)[i];
  const bool exists = at >= 0 && at < p.num_losses;
  const float dloss = exists ? Memory::global(p.dlosses)[at * p.dlosses_stride] : canonical_nan();
  Memory::global(side.d)[i] = one_nan(scaled_by(Memory::global(side.d_policy)[i], dloss));
}

}  // namespace rlk
