// Code that backends share for operators over tokens: the partial results of a tile, and the small functions that
// per-token formulas use. Templates also run on the vectors of cpu/simd.h.
//
// An operator's terms are a class with, for F float or a vector:
//   kInputs, kOutputs, kSums, Params, Factors              Factors are shared by a sequence's tokens; kSums 0 means no
//                                                          sums, counts and maxima
//   kMaxima                                                maxima of tokens, the first ones; the others are 0
//   sums_upper(p), upper_sum(i, tokens)                    EverySum, LowerSums, NoSums
//   sequences(p), mask(p), input(p, i), output(p, i)       an input whose data is null is 0, a null output not wanted
//   token(p, factors, inputs, mask, outputs, sums)         formulas of one token; masked inputs are 0 already; with
//                                                          kTakesPosition its position (of a vector's first) last
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
constexpr int kTokenMaxima = 4;  // maxima of values that are not negative

// The type of a count's addends: a mask for a single token. For a lane's several tokens the addend is the number of
// tokens that count, so no mask is kept.
template <class F>
struct CountType {
  using Type = MaskOf<F>;
  static RLK_HD Type of(MaskOf<F> mask) { return mask; }
};
template <class F>
RLK_HD typename CountType<F>::Type counted(MaskOf<F> mask) {
  return CountType<F>::of(mask);
}

// A token's share of the sums over its sequence.
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

// Base of terms that add every sum over the tokens. Any other class of terms says by sums_upper(p) whether it adds
// every sum. If not, upper_sum gives the last four sums from the tile's number of tokens.
constexpr int kLowerSums = 4;
struct EverySum {
  static constexpr int kMaxima = 2;
  static constexpr bool kHasSums = true, kTakesPosition = false, kMayBePacked = true;
  template <class Params>
  static RLK_HD bool sums_upper(const Params&) {
    return true;
  }
  static RLK_HD float upper_sum(int, std::uint32_t) { return 0.0f; }
  static RLK_HD float rest() { return 0.0f; }  // outputs of packed tokens outside every sequence
};
// For terms whose last four sums are 0.
struct LowerSums : EverySum {
  template <class Params>
  static RLK_HD bool sums_upper(const Params&) {
    return false;
  }
};
// For terms that only count; their sums are not read.
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

// Sums, counts and maxima of a batch. Sums follow the tree over the index of sequences; counts and maxima follow any
// order.
template <int kSums, int kCounts, int kMaxima>
struct TotalSums {
  float sum[kSums];
  std::int64_t count[kCounts];
  float maximum[kMaxima];
};
template <class Batch>
using TotalsOf = TotalSums<Batch::kSums, Batch::kCounts, Batch::kMaxima>;

// An operator that sums over tokens has a Batch with:
//   Params, Factors, Shared                a sequence gives its tokens Factors; all sequences give theirs Shared
//   kGroups, kSums, kCounts, kMaxima       groups of terms over the same tokens, eight sums each
//   sequences(p)
//   needs_pass_before(p)                   whether tokens need a value of their sequence, or of all
//   needs_sums(p)                          whether there are results beside those of tokens
//   missing()                              totals that change no result
//   of_sequence(p, context, s, sums)       totals of sequence s, by its sums of each group
//   kResults, store(p, context, total, i)  writes the i-th of the results
//   factors<Terms>(p, context, has_pass_before, s)   the values that tokens of sequence s share
// and for the pass before:
//   Statistics                             its terms
//   counts_alone(p)                        whether only its numbers of tokens are needed
//   factors_of(p, s, sums)                 Factors from a sequence's sums in that pass
//   share(factors, shared, add)            calls add(counter, count) on counters that all sequences share
//   shares(p)                              whether tokens or results need those counters
// Without that pass, the caller sets Shared.
template <class Batch, class = void>
constexpr bool kHasStatistics = false;
template <class Batch>
constexpr bool kHasStatistics<Batch, std::void_t<typename Batch::Statistics>> = true;

template <class Batch>
struct TokenContext {
  typename Batch::Factors* factors;  // [num_sequences]
  typename Batch::Shared* shared;    // [1]
};

// x where a token counts, else +0.
template <class F>
RLK_HD F where(MaskOf<F> mask, F x) {
  return select(mask, x, broadcast<F>(0.0f));
}
// One of two values, by a condition that is the same for all tokens. A conditional expression would make the compiler
// select between their addresses.
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
// `value` where x is NaN or in [low, high]; otherwise `outside`. low <= high.
template <class F>
RLK_HD F inside_or(F x, float low, float high, F value, F outside) {
  return select(x < broadcast<F>(low), outside, select(x > broadcast<F>(high), outside, value));
}
constexpr float kLargestFloat = 0x1.fffffep+127f;
// e^x where the mask is set; any value elsewhere.
template <class F>
RLK_HD F exp_where(MaskOf<F>, F x) {
  return exp(x);
}
// x times a factor. Zero times infinity is +0, because the infinity is a large number that was rounded. A NaN stays
// NaN.
template <class F>
RLK_HD F scaled_by(F x, F factor) {
  const F product = mul_rn(x, factor);
  return select(MaskOf<F>(is_nan(product) & (x == x) & (factor == factor)), broadcast<F>(0.0f), product);
}
// A sum; for two infinities of opposite signs it is the first operand.
template <class F>
RLK_HD F sum_or_first(F first, F second) {
  const F sum = add_rn(first, second);
  return select(MaskOf<F>(is_nan(sum) & (first == first) & (second == second)), first, sum);
}
// Whether the mask is set for any of the tokens in F.
RLK_HD bool any_of(bool mask) { return mask; }
template <class F>
RLK_HD F canonical(F x) {
  return select(is_nan(x), broadcast<F>(canonical_nan()), x);
}

// Reverses the order of values that are not negative, so that a maximum finds the least value. The map is its own
// inverse.
template <class F>
RLK_HD F opposite(F x) {
  const auto zero = bits_of(broadcast<F>(0.0f));
  return select(is_nan(x), x, float_of(zero - bits_of(x) + bits_of(infinity())));
}
RLK_HD float maximum_of(float a, float b) { return is_nan(a) || a > b ? a : b; }
RLK_HD float quotient_or_zero(float a, float b) { return b == 0.0f ? 0.0f : div_rn(a, b); }

}  // namespace rlk
