// Reads and sums a tile's tokens, one vector at a time, for operators over tokens. CMake compiles the files that
// include this header once per instruction set.
#pragma once

#include "../simd.h"
#include "../simd_fold.h"
#include "kernels/tokens/terms.h"
#include "tile.h"

namespace rlk::cpu::RLK_CPU_ISA {

// Writes -1 for a token that counts, else 0, for whole vectors.
RLK_HD void load_mask(const TokenMask& mask, std::int64_t at, int count, std::int32_t* to) {
  with_flag_bytes(mask, [&](auto bytes) {
    const FlagsFrom<decltype(bytes)::value> flags(mask, at);
    for (int i = 0; i < count; ++i) to[i] = flags.counts(flags.load(i)) ? -1 : 0;
  });
  for (int i = count; i % kLanes != 0; ++i) to[i] = 0;
}

RLK_HD Floats load_tokens(const float* from, int count) {
  if (count >= kLanes) return load_bytes<Floats>(from);
  alignas(64) float padded[kLanes] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(float));
  return load_bytes<Floats>(padded);
}
RLK_HD void store_tokens(float* to, int count, Floats x) {
  if (count >= kLanes) return store_bytes(to, x);
  alignas(64) float padded[kLanes];
  store_bytes(padded, x);
  std::memcpy(to, padded, static_cast<std::size_t>(count) * sizeof(float));
}

// Sums of neighbouring lanes: first the sums of a, then the sums of b.
RLK_HD Floats pair_sums(Floats a, Floats b) {
#if defined(__AVX512F__)
  const auto even = shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a.v, b.v);
  const auto odd = shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a.v, b.v);
#else
  const auto even = shuffle<0, 2, 4, 6, 8, 10, 12, 14>(a.v, b.v);
  const auto odd = shuffle<1, 3, 5, 7, 9, 11, 13, 15>(a.v, b.v);
#endif
  return {even + odd};
}
// The perfect binary tree over `count` vectors; the vectors are overwritten.
RLK_HD float tree_over(float* values, int count) {
  const Floats zero = broadcast<Floats>(0.0f);
  if (count == 0) return 0.0f;
  for (int width = count; width > 1; width = (width + 1) / 2) {
    for (int i = 0; i < width / 2; ++i) {
      const float* const from = values + 2 * i * kLanes;
      store_bytes(values + i * kLanes, pair_sums(load_bytes<Floats>(from), load_bytes<Floats>(from + kLanes)));
    }
    if (width % 2 == 0) continue;
    store_bytes(values + width / 2 * kLanes, pair_sums(load_bytes<Floats>(values + (width - 1) * kLanes), zero));
  }
  Floats node = load_bytes<Floats>(values);
  for (int width = kLanes; width > 1; width /= 2) node = pair_sums(node, zero);
  return node.v[0];
}

// Sums of a tile's tokens: call take() for each vector, then finish().
template <int kSums, bool kHasSums, int kMaxima>
class TileSums {
 public:
  // `upper` says whether the sums with index kLowerSums and above are used.
  RLK_HD void take(int k, const TokenSums<Floats, kSums>& sums, bool upper) {
    if constexpr (kHasSums) {
      for (int i = 0; i < kLowerSums; ++i) store_bytes(terms_[i] + k, sums.sum[i]);
      if (upper) {
        for (int i = kLowerSums; i < kSums; ++i) store_bytes(terms_[i] + k, sums.sum[i]);
      }
    }
    for (int i = 0; i < kTokenCounts; ++i) {
      counts_[i] += static_cast<std::uint32_t>(__builtin_popcount(lanes_of(sums.count[i])));
    }
    for (int i = 0; i < kMaxima; ++i) {
      const Floats x = sums.maximum[i];
      maxima_[i] = select(is_nan(maxima_[i]) | (maxima_[i] > x), maxima_[i], x);
    }
  }
  // Adds the `vectors` vectors that take() stored. If `upper` is false, upper_sum(i, tokens) gives the sums with index
  // kLowerSums and above.
  template <class UpperSum>
  RLK_HD void finish(int vectors, bool upper, const UpperSum& upper_sum, TilePartial<kSums>* partial) {
    for (int i = 0; i < kSums; ++i) {
      partial->sum[i] = i >= kLowerSums && !upper ? upper_sum(i, counts_[0])
                        : kHasSums                ? tree_over(terms_[i], vectors)
                                                  : 0.0f;
    }
    for (int i = 0; i < kTokenCounts; ++i) partial->count[i] = counts_[i];
    for (int i = 0; i < kTokenMaxima; ++i) {
      partial->maximum[i] = 0.0f;
      if (i >= kMaxima) continue;
      alignas(64) float lanes[kLanes];
      store_bytes(lanes, maxima_[i]);
      float most = 0.0f;
      for (const float x : lanes) most = maximum_of(most, x);
      partial->maximum[i] = most;
    }
  }

 private:
  alignas(64) float terms_[kHasSums ? kSums : 1][kHasSums ? kTilePositions : 1];
  std::uint32_t counts_[kTokenCounts] = {};
  Floats maxima_[kMaxima] = {};
};
template <int kMaxima>
class TileSums<0, true, kMaxima> {
 public:
  RLK_HD void take(int, const TokenSums<Floats, 0>&, bool) {}
  template <class UpperSum>
  RLK_HD void finish(int, bool, const UpperSum&, TilePartial<0>*) {}
};

// distance of prefetches, in floats; the hardware prefetcher does not cross a page
constexpr int kAhead = 512;

template <class Terms>
RLK_HD void run_tile(const typename Terms::Params& p, const typename Terms::Factors& factors, const TokenTile& tile,
                     TilePartial<Terms::kSums>* partial) {
  constexpr int kInputs = Terms::kInputs, kOutputs = Terms::kOutputs, kSums = Terms::kSums;
  alignas(64) std::int32_t mask[kTilePositions];
  const Sequences& q = Terms::sequences(p);
  const TokenSpan span = {tile.begin, tile.first + tile.count};
  const TokenMask& m = Terms::mask(p);
  const std::int64_t row = q.packed() ? tile.begin : tile.sequence * m.row_stride;
  load_mask(m, row + tile.first, tile.count, mask);
  const float* from[kInputs];
  std::int64_t step[kInputs];
  for (int i = 0; i < kInputs; ++i) {
    const PolicyTokens a = Terms::input(p, i);
    from[i] = a.data == nullptr ? nullptr : a.data + offset_of(a, q, tile.sequence, span) + tile.first * a.token_stride;
    step[i] = a.token_stride;
  }
  float* to[kOutputs];
  for (int i = 0; i < kOutputs; ++i) {
    float* const out = Terms::output(p, i);
    to[i] = out == nullptr ? nullptr : out + (q.packed() ? tile.begin : tile.sequence * q.num_tokens) + tile.first;
  }
  const Floats zero = broadcast<Floats>(0.0f);
  TileSums<kSums, Terms::kHasSums, Terms::kMaxima> gathered;
  const bool upper = Terms::sums_upper(p);
  for (int k = 0; k < tile.count; k += kLanes) {
    const int left = tile.count - k;
    const Mask taken = {load_bytes<Ints>(mask + k).v};
    Floats in[kInputs], out[kOutputs];
    for (int i = 0; i < kInputs; ++i) {
      in[i] = zero;
      if (from[i] == nullptr) continue;
      const Floats x = step[i] == 0 ? broadcast<Floats>(*from[i]) : load_tokens(from[i] + k, left);
      if (step[i] != 0) __builtin_prefetch(from[i] + k + kAhead);
      in[i] = select(taken, x, zero);
    }
    TokenSums<Floats, kSums> sums;
    token_at<Terms>(p, factors, in, taken, out, &sums, tile.first + k);
    for (int i = 0; i < kOutputs; ++i) {
      if (to[i] != nullptr) store_tokens(to[i] + k, left, out[i]);
    }
    gathered.take(k, sums, upper);
  }
  const auto upper_sum = [](int i, std::uint32_t tokens) { return Terms::upper_sum(i, tokens); };
  gathered.finish((tile.count + kLanes - 1) / kLanes, upper, upper_sum, partial);
}

}  // namespace rlk::cpu::RLK_CPU_ISA
