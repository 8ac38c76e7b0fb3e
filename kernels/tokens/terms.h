// Code for operators over tokens that backends share: the partial results of a tile, and small functions for formulas
// per token. The templates also work on the vectors of cpu/simd.h.
//
// An operator's terms are a class that tells what each token adds to sums, and what is written for it. The class has,
// for F float or a vector:
//   kInputs, kOutputs, kSums, Params, Factors              a sequence's tokens share Factors; if kSums is 0, there are
//                                                          no sums, counts and maxima
//   kMaxima                                                number of maxima that the terms set; the others are 0
//   sums_upper(p), upper_sum(i, tokens)                    inherited from EverySum, LowerSums or NoSums
//   sequences(p), mask(p), input(p, i), output(p, i)       an input with null data reads as 0; a null output is not
//                                                          written
//   token(p, factors, inputs, mask, outputs, sums)         the formulas of one token. Masked inputs are already 0. With
//                                                          kTakesPosition, the position of the (first) token is the
//                                                          last argument
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/tokens/slots.h"
#include "rlk/math/exp.h"
#include "rlk/math/ieee.h"
#include "rlk/math/tree_sum.h"
#include "rlk/unroll.h"

namespace rlk {

RLK_HD bool is_aligned(const void* p, unsigned bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; }

template <class F>
struct MaskType {
  using Type = decltype(F{} < F{});
};
template <class F>
using MaskOf = typename MaskType<F>::Type;

constexpr int kTokenCounts = 6;
constexpr int kTokenMaxima = 4;  // values whose maximum is computed must not be negative

// The type of what a token adds to a count. For a single token the type is a mask. If a lane has several tokens, it
// adds the number of tokens for which the mask is set, so that registers need not hold the mask.
template <class F>
struct CountType {
  using Type = MaskOf<F>;
  static RLK_HD Type of(MaskOf<F> mask) { return mask; }
};
template <class F>
RLK_HD typename CountType<F>::Type counted(MaskOf<F> mask) {
  return CountType<F>::of(mask);
}

// What a token adds to the sums, counts and maxima of its sequence.
template <class F, int kSums>
struct TokenSums {
  F sum[kSums];
  typename CountType<F>::Type count[kTokenCounts];
  F maximum[kTokenMaxima];
};
template <class F>
struct TokenSums<F, 0> {};
template <class F, int kSums>
RLK_HD void clear(TokenSums<F, kSums>* sums) {
  const F zero = broadcast<F>(0.0f);
  RLK_UNROLL
  for (F& sum : sums->sum) sum = zero;
  RLK_UNROLL
  for (F& m : sums->maximum) m = zero;
  RLK_UNROLL
  for (auto& c : sums->count) c = counted<F>(MaskOf<F>(zero > zero));
}

// The base class of terms that add all of their sums for each token. Other terms override sums_upper(p). If
// sums_upper() returns false, only the first four sums are added per token, and upper_sum() computes the last four from
// the tile's number of tokens.
constexpr int kLowerSums = 4;
struct EverySum {
  static constexpr int kMaxima = 2;
  static constexpr bool kHasSums = true, kTakesPosition = false, kMayBePacked = true;
  template <class Params>
  static RLK_HD bool sums_upper(const Params&) {
    return true;
  }
  static RLK_HD float upper_sum(int, std::uint32_t) { return 0.0f; }
  static RLK_HD float rest() { return 0.0f; }  // the output of a packed token outside every sequence
};
// The base class of terms whose last four sums are 0.
struct LowerSums : EverySum {
  template <class Params>
  static RLK_HD bool sums_upper(const Params&) {
    return false;
  }
};
// The base class of terms that only count tokens. The sums of such terms are never read.
struct NoSums : LowerSums {
  static constexpr bool kHasSums = false;
};

template <class Terms, class F>
RLK_HD void token_at(const typename Terms::Params& p, const typename Terms::Factors& factors,
                     const F (&in)[Terms::kInputs], MaskOf<F> mask, F (&out)[Terms::kOutputs],
                     TokenSums<F, Terms::kSums>* sums, [[maybe_unused]] std::int64_t position) {
  if constexpr (Terms::kTakesPosition) {
    Terms::token(p, factors, in, mask, out, sums, position);
  } else {
    Terms::token(p, factors, in, mask, out, sums);
  }
}

// Sums, counts and maxima of a tile.
template <int kSums>
struct alignas(16) TilePartial {
  float sum[kSums];
  std::uint32_t count[kTokenCounts];
  float maximum[kTokenMaxima];
};
template <>
struct TilePartial<0> {};

// Sums, counts and maxima of a sequence.
template <int kSums>
struct SequenceSums {
  float sum[kSums];
  std::int64_t count[kTokenCounts];
  float maximum[kTokenMaxima];
};

// Sums, counts and maxima of a batch. Sums follow the tree over the indices of sequences. Counts and maxima do not
// depend on the order.
template <int kSums, int kCounts, int kMaxima>
struct TotalSums {
  float sum[kSums];
  std::int64_t count[kCounts];
  float maximum[kMaxima];
};
template <class Batch>
using TotalsOf = TotalSums<Batch::kSums, Batch::kCounts, Batch::kMaxima>;

// An operator that sums over tokens has a Batch with:
//   Params, Factors, Shared                the tokens of a sequence share Factors; all tokens of a call share Shared
//   kGroups, kSums, kCounts, kMaxima       kGroups groups of terms read the same tokens; each group has eight sums
//   sequences(p)
//   needs_pass_before(p)                   whether tokens need values of their sequence, or values of all sequences
//   needs_sums(p)                          whether there are results in addition to those of tokens
//   missing()                              totals that change no result when they are added
//   of_sequence(p, context, s, sums)       totals of sequence s, from its sums in each group
//   kResults, store(p, context, total, i)  writes result i
//   factors<Terms>(p, context, has_pass_before, s)   the values that tokens of sequence s share
// Some operators need a first pass over tokens, before the pass that writes outputs. The Batch of such an operator
// also has:
//   Statistics                             the terms of that pass
//   counts_alone(p)                        whether only the numbers of tokens are needed from that pass
//   factors_of(p, s, sums)                 Factors from a sequence's sums in that pass
//   share(factors, shared, add)            calls add(counter, count) on counters that all sequences share
//   shares(p)                              whether tokens or results need those counters
// If that first pass does not run, the caller sets Shared.
template <class Batch, class = void>
constexpr bool kHasStatistics = false;
template <class Batch>
constexpr bool kHasStatistics<Batch, std::void_t<typename Batch::Statistics>> = true;

template <class Batch>
struct TokenContext {
  typename Batch::Factors* factors;  // [num_sequences]
  typename Batch::Shared* shared;    // [1]
};

// x if the mask is set, else +0.
template <class F>
RLK_HD F where(MaskOf<F> mask, F x) {
  return select(mask, x, broadcast<F>(0.0f));
}
// One of two values, selected by a condition that is the same for all tokens. With a conditional expression the
// compiler would select between the addresses of the values.
template <class F>
RLK_HD F either(bool condition, F yes, F no) {
  F chosen = no;
  if (condition) chosen = yes;
  return chosen;
}
template <class F>
RLK_HD F min_of(F a, F b) {
  return select(b < a, b, a);
}
template <class F>
RLK_HD F max_of(F a, F b) {
  return select(b > a, b, a);
}
template <class F>
RLK_HD F clamped(F x, float low, float high) {
  return min_of(max_of(x, broadcast<F>(low)), broadcast<F>(high));
}
// `value` if x is NaN or in [low, high], else `outside`. Requires low <= high.
template <class F>
RLK_HD F inside_or(F x, float low, float high, F value, F outside) {
  return select(x < broadcast<F>(low), outside, select(x > broadcast<F>(high), outside, value));
}
constexpr float kLargestFloat = 0x1.fffffep+127f;
// e^x if the mask is set. Where the mask is not set, the result may be any value.
template <class F>
RLK_HD F exp_where(MaskOf<F>, F x) {
  return exp(x);
}
// x times a factor. Zero times infinity gives +0, because the infinity stands for a large number that overflowed. A NaN
// stays NaN.
template <class F>
RLK_HD F scaled_by(F x, F factor) {
  const F product = mul_rn(x, factor);
  return select(MaskOf<F>(is_nan(product) & (x == x) & (factor == factor)), broadcast<F>(0.0f), product);
}
// first + second. If the two numbers are infinities of opposite signs, the result is `first`.
template <class F>
RLK_HD F sum_or_first(F first, F second) {
  const F sum = add_rn(first, second);
  return select(MaskOf<F>(is_nan(sum) & (first == first) & (second == second)), first, sum);
}
// Whether the mask is set for any token.
RLK_HD bool any_of(bool mask) { return mask; }
template <class F>
RLK_HD F canonical(F x) {
  return select(is_nan(x), broadcast<F>(canonical_nan()), x);
}

// Maps values that are not negative to values in reverse order, so that a maximum finds the least value. The map is its
// own inverse.
template <class F>
RLK_HD F opposite(F x) {
  const auto zero = bits_of(broadcast<F>(0.0f));
  return select(is_nan(x), x, float_of(zero - bits_of(x) + bits_of(infinity())));
}
RLK_HD float maximum_of(float a, float b) { return is_nan(a) || a > b ? a : b; }
RLK_HD float quotient_or_zero(float a, float b) { return b == 0.0f ? 0.0f : div_rn(a, b); }

}  // namespace rlk
