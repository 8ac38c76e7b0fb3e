// Second moments about means that an earlier pass found, for all backends. Variances, covariances and correlations need
// a second pass over tokens, which sums scaled deviations. terms.h defines a Batch and its terms.
//
// The values `a` of all tokens have the mean m = fl(sum / N). `down` and `up` are the factors by which moment_scale.h
// scales, given the largest magnitude. With the deviation d and D = sum(d), which takes out the rounding of m:
//   d(a) = fl(fl(fl(a down) - fl(m down)) up)
//   V    = max(fma(-D, fl(D / N), sum(fl(d d))), 0); exactly 0 if all d are equal
//   C    = fma(-D_a, fl(D_b / N), sum(fl(d_a d_b)))
#pragma once

#include "kernels/tokens/terms.h"
#include "rlk/math/moment_scale.h"

namespace rlk {

struct CentralPoint {
  float down = 1.0f, up = 1.0f, mean = 0.0f;  // mean: the mean times `down`
  template <class F>
  RLK_HD F deviation(F a) const {
    const F scaled = sub_rn(mul_rn(a, broadcast<F>(down)), broadcast<F>(mean));
    return mul_rn(scaled, broadcast<F>(up));
  }
  // The power of two by which a scaled deviation is multiplied to undo the scale.
  RLK_HD float unit() const { return inverse_of(mul_rn(down, up)); }
};
RLK_HD CentralPoint central_point(float sum, float count, float largest) {
  const MomentScale scale = moment_scale(largest, largest);
  return {scale.down, scale.up, mul_rn(quotient_or_zero(sum, count), scale.down)};
}
RLK_HD float central_product(float of_a, float of_b, float products, float count) {
  return fma_rn(-of_a, quotient_or_zero(of_b, count), products);
}
RLK_HD float central_square(float of_a, float squares, float count) {
  const float v = central_product(of_a, of_a, squares, count);
  return v < 0.0f ? 0.0f : v;
}

// The mean and scale of two values, a and b, of each token.
struct CentralPair {
  CentralPoint of[2];
};

enum : int { kCentralOfA, kCentralOfB, kCentralSquaresA, kCentralSquaresB, kCentralProducts, kCentralSums };
enum : int { kCentralTokens, kCentralNegativeA, kCentralNegativeB, kCentralSequences, kCentralBadCuts, kCentralCounts };
enum : int {
  kCentralMostA,
  kCentralMostB,
  kCentralLeastA,
  kCentralLeastB,
  kCentralMaxima
};  // the largest and the least |d|; a maximum over opposite(|d|) finds the least
static_assert(kCentralMaxima <= kTokenMaxima && kCentralSquaresB < kLowerSums);

// `Of` is a class that describes the operator. The class has Params, Pair, kInputs, kProducts, input and values. The
// function values(pair, inputs, values) writes a token's two values a and b.
template <class Of>
struct CentralTerms : EverySum {
  static constexpr int kInputs = Of::kInputs, kOutputs = 1, kSums = 8, kMaxima = kCentralMaxima;
  using Params = typename Of::Params;
  using Factors = typename Of::Pair;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD const TokenMask& mask(const Params& p) { return p.mask; }
  static RLK_HD PolicyTokens input(const Params& p, int i) { return Of::input(p, i); }
  static RLK_HD float* output(const Params&, int) { return nullptr; }
  static RLK_HD bool sums_upper(const Params&) { return Of::kProducts; }

  template <class F>
  static RLK_HD void token(const Params&, const Factors& pair, const F (&in)[kInputs], MaskOf<F> mask,
                           F (&out)[kOutputs], TokenSums<F, kSums>* sums) {
    const F zero = broadcast<F>(0.0f);
    F d[2];
    Of::values(pair, in, d);
    RLK_UNROLL
    for (int i = 0; i < 2; ++i) d[i] = where(mask, pair.of[i].deviation(d[i]));
    out[0] = zero;
    clear(sums);
    sums->count[kCentralTokens] = counted<F>(mask);
    RLK_UNROLL
    for (int i = 0; i < 2; ++i) {
      const F size = abs_of(d[i]);
      sums->sum[kCentralOfA + i] = d[i];
      sums->sum[kCentralSquaresA + i] = mul_rn(d[i], d[i]);
      sums->count[kCentralNegativeA + i] = counted<F>(MaskOf<F>(d[i] < zero));
      sums->maximum[kCentralMostA + i] = size;
      sums->maximum[kCentralLeastA + i] = where(mask, opposite(size));
    }
    if constexpr (Of::kProducts) sums->sum[kCentralProducts] = mul_rn(d[0], d[1]);
  }
};

// This pass reads Shared::pair, which the earlier passes have written. In addition, the class `Of` has
//   Batch; of_sequence(pair, sums, total), which may replace value b of a sequence's tokens by one for the sequence;
//   kResults, metric(i), result(pair, total, i): the metrics that follow, and their values
template <class Of>
struct CentralBatch {
  static constexpr int kGroups = 1, kSums = kCentralSums, kCounts = kCentralCounts, kMaxima = kCentralMaxima;
  static constexpr int kResults = Of::kResults;
  using Params = typename Of::Params;
  using Factors = typename Of::Pair;
  using Shared = typename Of::Batch::Shared;
  using Context = TokenContext<CentralBatch>;
  using Total = TotalSums<kSums, kCounts, kMaxima>;
  static RLK_HD const Sequences& sequences(const Params& p) { return p.sequences; }
  static RLK_HD bool needs_pass_before(const Params&) { return false; }
  static RLK_HD bool needs_sums(const Params&) { return true; }
  template <class Terms>
  static RLK_HD Factors factors(const Params&, const Context& context, bool, std::int64_t) {
    return in_global(context.shared)->pair;
  }
  static RLK_HD Total missing() { return {}; }
  static RLK_HD Total of_sequence(const Params& p, const Context& context, std::int64_t s,
                                  const SequenceSums<8> (&groups)[kGroups]) {
    // This pass uses the memory of the earlier passes (workspace.h).
    static_assert(sizeof(Total) <= sizeof(TotalsOf<typename Of::Batch>));
    const SequenceSums<8>& of = groups[0];
    Total t = {};
    for (int i = 0; i < kSums; ++i) t.sum[i] = of.sum[i];
    for (int i = 0; i < kCentralSequences; ++i) t.count[i] = of.count[i];
    t.count[kCentralSequences] = of.count[kCentralTokens] > 0;
    for (int i = 0; i < kMaxima; ++i) t.maximum[i] = of.maximum[i];
    t.count[kCentralBadCuts] = has_bad_offsets(p.sequences, s);
    Of::of_sequence(in_global(context.shared)->pair, of, &t);
    return t;
  }
  static RLK_HD void store(const Params& p, const Context& context, const Total& t, int i) {
    const float result = Of::result(in_global(context.shared)->pair, t, i);
    in_global(p.metrics)[Of::metric(i)] = finished_sum(t.count[kCentralBadCuts] > 0 ? canonical_nan() : result);
  }
};

template <class Total>
RLK_HD bool is_constant(const Total& t, int i) {
  const std::int64_t negative = t.count[kCentralNegativeA + i];
  const bool one_sign = negative == 0 || negative == t.count[kCentralTokens];
  return one_sign && t.maximum[kCentralMostA + i] == opposite(t.maximum[kCentralLeastA + i]);
}
// The sum of squares of (value i - mean of value i), over all tokens.
template <class Total>
RLK_HD float central_square(const Total& t, int i) {
  if (is_constant(t, i)) return 0.0f;
  return central_square(t.sum[kCentralOfA + i], t.sum[kCentralSquaresA + i],
                        static_cast<float>(t.count[kCentralTokens]));
}

}  // namespace rlk
