// The results of a batch of tokens. Each thread can compute one result. Nearly all results are a sum, a count or a
// maximum among the batch's totals. Some results are divided by the number of tokens or of sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/tokens/terms.h"

namespace rlk {

enum class ResultOf : std::uint16_t { kSum, kCount, kMaximum };
enum class ResultOver : std::uint16_t { kOne, kTokens, kSequences };
struct ResultSource {
  ResultOf of;
  int index;
  ResultOver over;
};

// For each of kResults results: the total that gives the result, and its divisor. These entries are packed into words.
// source_of<Results>(result) looks up one entry. The words are literals in the code, because device code cannot read a
// constexpr table of the host.
template <int kResults>
struct ResultSources {
  static constexpr int kBits = 16, kEach = 64 / kBits, kWords = (kResults + kEach - 1) / kEach;
  std::uint64_t words[kWords] = {};
  constexpr void set(int result, ResultOf of, int index, ResultOver over = ResultOver::kOne) {
    const auto code = static_cast<std::uint64_t>(static_cast<int>(of) | static_cast<int>(over) << 2 | index << 4);
    words[result / kEach] |= code << (kBits * (result % kEach));
  }
};
template <class Results, std::size_t... kWord>
RLK_HD ResultSource source_of(int result, std::index_sequence<kWord...>) {
  using Sources = decltype(Results::sources());
  std::uint64_t word = 0;
  const int at = result / Sources::kEach;
  ((word = at == static_cast<int>(kWord) ? std::integral_constant<std::uint64_t, Results::sources().words[kWord]>::value
                                         : word),
   ...);
  const auto code = static_cast<int>(word >> (Sources::kBits * (result % Sources::kEach)) & 0xffff);
  return {static_cast<ResultOf>(code & 3), code >> 4, static_cast<ResultOver>(code >> 2 & 3)};
}
template <class Results>
RLK_HD ResultSource source_of(int result) {
  return source_of<Results>(result, std::make_index_sequence<decltype(Results::sources())::kWords>{});
}

// A number and its divisor. The division takes longer than all steps before it, so the code for all results shares one
// division.
struct Quotient {
  float n, d;
  RLK_HD float value() const { return finished_sum(quotient_or_zero(n, d)); }
};
template <class Total>
RLK_HD Quotient result_of(const ResultSource& from, const Total& t, float tokens, float sequences) {
  Quotient q = {0.0f, from.over == ResultOver::kTokens ? tokens : 1.0f};
  if (from.over == ResultOver::kSequences) q.d = sequences;
  if (from.of == ResultOf::kSum) q.n = t.sum[from.index];
  if (from.of == ResultOf::kCount) q.n = static_cast<float>(t.count[from.index]);
  if (from.of == ResultOf::kMaximum) q.n = t.maximum[from.index];
  return q;
}

}  // namespace rlk
