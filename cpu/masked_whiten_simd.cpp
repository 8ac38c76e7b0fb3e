// The inner loops of the operator `masked_whiten`. CMake compiles this file once per instruction set.
#include "masked_whiten_simd.h"

#include "kernels/advantages/masked_whiten_token.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

constexpr int kChunk = 128;

// Calls f(x, mask of tokens that count, place) for every vector of a chunk that has a token.
template <class F>
RLK_HD void for_each_vector(const WhitenTokens& t, std::int64_t first, const F& f) {
  alignas(64) std::int32_t mask[kChunk];
  const int count = t.length - first < kChunk ? static_cast<int>(t.length - first) : kChunk;
  load_mask(t.mask, t.at + first, count, mask);
  for (int k = 0; k < count; k += kLanes) {
    f(load_tokens(t.x + first + k, count - k), Mask{load_bytes<Ints>(mask + k).v}, k);
  }
}

// Sum of term(x, mask of tokens that count), in the contract's order.
template <class F>
RLK_HD float sum_of(const WhitenTokens& t, const F& term) {
  SumTree<kSequenceLevels> tree;
  for (std::int64_t first = 0; first < t.length; first += kChunk) {
    alignas(64) float terms[kChunk] = {};
    for_each_vector(t, first, [&](Floats x, Mask taken, int k) {
      store_bytes(terms + k, select(taken, term(x, taken), broadcast<Floats>(0.0f)));
    });
    tree.take(tree_over(terms, kChunk / kLanes));
  }
  return finished_sum(tree.finish());
}

WhitenSums sums(const WhitenTokens& t) {
  Floats least = broadcast<Floats>(infinity()), largest = broadcast<Floats>(-infinity());
  WhitenSums of = {0, 0.0f, infinity(), -infinity()};
  of.sum = sum_of(t, [&](Floats x, Mask taken) {
    of.n += __builtin_popcount(lanes_of(taken));
    least = select(taken & (x < least), x, least);
    largest = select(taken & (x > largest), x, largest);
    return x;
  });
  for (int i = 0; i < kLanes; ++i) {
    of.least = least.v[i] < of.least ? least.v[i] : of.least;
    of.largest = largest.v[i] > of.largest ? largest.v[i] : of.largest;
  }
  return of;
}

float squares(const WhitenTokens& t, const WhitenStatistics& s) {
  return sum_of(t, [&](Floats x, Mask) { return whiten_square(s, x); });
}

void write(const WhitenTokens& t, const MaskedWhitenParams& p, const WhitenStatistics& s, float* y) {
  for (std::int64_t first = 0; first < t.length; first += kChunk) {
    for_each_vector(t, first, [&](Floats x, Mask taken, int k) {
      const std::int64_t left = t.length - first - k;
      store_tokens(y + first + k, left < kLanes ? static_cast<int>(left) : kLanes,
                   select(taken, whiten_token(p, s, x), broadcast<Floats>(0.0f)));
    });
  }
}

}  // namespace

const MaskedWhitenLanes masked_whiten_simd = {sums, squares, write};

}  // namespace rlk::cpu::RLK_CPU_ISA
