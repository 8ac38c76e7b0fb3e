// Passes over tokens on a GPU, for every vendor: a lane has four neighbouring positions, or one; sums go up the tree over
// positions by an exchange that leaves each lane one of them, so that eight sums cost nine or ten shuffles.
//
// token_tiles: a tile is the positions of a wave, or 2^tile >= 1024 of a block, whose waves have stretches of it. Bound by
// HBM: every array is read once, by a lane all its tokens at once where addresses allow.
// sums_of_sequences: the tree over the tiles of a sequence, a block for several sequences.
//
// Gpu: kLanes of a wave; Tokens, a lane's, Quad or float; again, of a kernel's first argument, the params; thread();
// shuffle_xor, barrier, sum_over_wave and max_over_wave; load and store of Tokens, and of a Quad, at multiples of their
// size; count_on, an atomic addition.
#pragma once

#include "rlk/kernels/quad.h"
#include "rlk/kernels/token_terms.h"

namespace rlk {

constexpr int kTokenThreads = 256;
constexpr int kMostSteps = 3;  // of a block's tile: 2^3
constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }
template <class Gpu>
constexpr int kPerLane = sizeof(typename Gpu::Tokens) / sizeof(float);
template <class Gpu>
constexpr int kWaveTile = log2_of(Gpu::kLanes* kPerLane<Gpu>);
template <class Gpu>
constexpr int kLeastBlockTile = log2_of(kTokenThreads* kPerLane<Gpu>);
template <class Gpu>
constexpr int kMostBlockTile = kLeastBlockTile<Gpu> + kMostSteps;
template <class Gpu>
constexpr int kTokenWaves = kTokenThreads / Gpu::kLanes;
constexpr int kMostTokenWaves = 8;

RLK_HD bool is_aligned(const void* p, unsigned bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; }

RLK_DEVICE float& token_of(float& x, int) { return x; }
RLK_DEVICE float& token_of(Quad& x, int i) { return x.v[i]; }
RLK_DEVICE bool& token_of(bool& x, int) { return x; }
RLK_DEVICE std::int32_t& token_of(QuadMask& x, int i) { return x.v[i]; }

template <class Mask>
constexpr int kMaskCount = sizeof(Mask) == sizeof(bool) ? 1 : kQuad;
template <class Mask, class T>
RLK_DEVICE Mask mask_of_elements(const T* from, int count) {
  Mask m;
  constexpr int kCount = kMaskCount<Mask>;
  constexpr unsigned kBytes = sizeof(T) * kCount;
  if (count >= kCount && is_aligned(from, kBytes < 16 ? kBytes : 16)) {
    constexpr int kVectors = kBytes > 16 ? kBytes / 16 : 1, kEach = kCount / kVectors;
    struct alignas(kEach * sizeof(T)) Part {
      T v[kEach];
    };
    RLK_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const Part part = reinterpret_cast<const Part*>(from)[i];
      RLK_UNROLL
      for (int j = 0; j < kEach; ++j) token_of(m, i * kEach + j) = part.v[j] != T{0} ? -1 : 0;
    }
  } else {
    RLK_UNROLL
    for (int i = 0; i < kCount; ++i) token_of(m, i) = i < count && from[i] != T{0} ? -1 : 0;
  }
  return m;
}
template <class Mask>
RLK_DEVICE Mask load_mask(const PolicyMask& mask, std::int64_t at, int count) {
  if (mask.data == nullptr) {
    Mask m;
    RLK_UNROLL
    for (int i = 0; i < kMaskCount<Mask>; ++i) token_of(m, i) = i < count ? -1 : 0;
    return m;
  }
  switch (mask.dtype) {
    case DType::kInt32:
      return mask_of_elements<Mask>(in_global(static_cast<const std::int32_t*>(mask.data)) + at, count);
    case DType::kInt64:
      return mask_of_elements<Mask>(in_global(static_cast<const std::int64_t*>(mask.data)) + at, count);
    case DType::kFloat32:
      return mask_of_elements<Mask>(in_global(static_cast<const float*>(mask.data)) + at, count);
    default:
      return mask_of_elements<Mask>(in_global(static_cast<const std::uint8_t*>(mask.data)) + at, count);
  }
}

// Of eight sums over a wave's lanes a lane gets the one of this index.
RLK_HD int sum_index(int lane) { return (lane & 1) << 2 | (lane & 2) | (lane >> 2 & 1); }
template <class Gpu, int kDistance, int kHalf>
RLK_DEVICE void exchange(float (&x)[8]) {
  const bool upper = (Gpu::thread() & kDistance) != 0;
  RLK_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? x[i] : x[i + kHalf], kept = upper ? x[i + kHalf] : x[i];
    x[i] = add_rn(kept, Gpu::shuffle_xor(sent, kDistance));
  }
}
template <class Gpu>
RLK_DEVICE float scattered_sum(float (&x)[8]) {
  exchange<Gpu, 1, 4>(x);
  exchange<Gpu, 2, 2>(x);
  exchange<Gpu, 4, 1>(x);
  RLK_UNROLL
  for (int distance = 8; distance < Gpu::kLanes; distance *= 2) x[0] = add_rn(x[0], Gpu::shuffle_xor(x[0], distance));
  return x[0];
}

// What a wave has of its stretch: this lane's sum, and all counts and maxima.
struct WaveTokens {
  float sum;
  std::uint32_t count[kTokenCounts];
  float maximum[kTokenMaxima];
};

// A wave's steps, each of as many tokens as its lanes have: take() each, then finish().
template <class Gpu, int kSums>
class WaveSums {
 public:
  RLK_DEVICE void take(TokenSums<typename Gpu::Tokens, kSums>* sums) {
    static_assert(kSums == 8);
    constexpr int kEach = kPerLane<Gpu>;
    float of_lane[kSums];
    RLK_UNROLL
    for (int i = 0; i < kSums; ++i) {
      RLK_UNROLL
      for (int distance = 1; distance < kEach; distance *= 2) {
        RLK_UNROLL
        for (int j = 0; j < kEach; j += 2 * distance) {
          token_of(sums->sum[i], j) = add_rn(token_of(sums->sum[i], j), token_of(sums->sum[i], j + distance));
        }
      }
      of_lane[i] = token_of(sums->sum[i], 0);
    }
    tree_.take(scattered_sum<Gpu>(of_lane));
    RLK_UNROLL
    for (int j = 0; j < kEach; ++j) {
      RLK_UNROLL
      for (int i = 0; i < kTokenCounts; ++i) counts_[i] += token_of(sums->count[i], j) != 0 ? 1 : 0;
      RLK_UNROLL
      for (int i = 0; i < kTokenMaxima; ++i) {
        const auto bits = static_cast<std::uint32_t>(bits_of(token_of(sums->maximum[i], j)));
        most_[i] = most_[i] > bits ? most_[i] : bits;
      }
    }
  }
  RLK_DEVICE WaveTokens finish() const {
    WaveTokens of;
    of.sum = tree_.finish();
    RLK_UNROLL
    for (int i = 0; i < kTokenCounts; i += 2) {  // two at a time: a wave has fewer than 2^16
      const std::uint32_t both = Gpu::sum_over_wave(static_cast<std::uint32_t>(counts_[i] | counts_[i + 1] << 16));
      of.count[i] = both & 0xffff;
      of.count[i + 1] = both >> 16;
    }
    RLK_UNROLL
    for (int i = 0; i < kTokenMaxima; ++i)
      of.maximum[i] = float_of(static_cast<std::int32_t>(Gpu::max_over_wave(most_[i])));
    return of;
  }

 private:
  SumTree<kMostSteps + 1> tree_;
  int counts_[kTokenCounts] = {};
  std::uint32_t most_[kTokenMaxima] = {};  // patterns: of floats that are not negative their order, a NaN above all
};
template <class Gpu>
class WaveSums<Gpu, 0> {
 public:
  RLK_DEVICE void take(TokenSums<typename Gpu::Tokens, 0>*) {}
  RLK_DEVICE WaveTokens finish() const { return {}; }
};

// A wave's `steps` times kLanes * kPerLane positions of sequence s from `first` on.
template <class Gpu, class Terms>
RLK_DEVICE WaveTokens wave_tokens(const typename Terms::Params& p, const typename Terms::Factors& factors,
                                  std::int64_t s, const PolicySpan& span, std::int64_t first, int steps) {
  using Tokens = typename Gpu::Tokens;
  constexpr int kInputs = Terms::kInputs, kOutputs = Terms::kOutputs, kSums = Terms::kSums, kEach = kPerLane<Gpu>;
  constexpr int kStep = Gpu::kLanes * kEach;
  constexpr unsigned kBytes = sizeof(Tokens);
  const PolicySequences& q = Terms::sequences(p);
  const int lane = Gpu::thread() % Gpu::kLanes;
  const PolicyMask& mask = Terms::mask(p);
  const std::int64_t row = q.packed() ? span.begin : s * q.num_tokens;
  const std::int64_t mask_row = q.packed() ? span.begin : s * mask.sequence_stride;
  bool aligned = true;  // all arrays of tokens, for this sequence
  RLK_UNROLL
  for (int i = 0; i < kInputs; ++i) {
    const PolicyTokens a = Terms::input(p, i);
    if (a.token_stride != 0) aligned = aligned && is_aligned(a.data + offset_of(a, q, s, span), kBytes);
  }
  RLK_UNROLL
  for (int i = 0; i < kOutputs; ++i) aligned = aligned && is_aligned(Terms::output(p, i) + row, kBytes);
  WaveSums<Gpu, kSums> gathered;
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll 1
#endif
  for (int step = 0; step < steps; ++step) {
    const typename Terms::Params& now = Gpu::again(p);
    const std::int64_t begin = first + step * kStep, position = begin + lane * kEach, left = span.length - position;
    const int count = left < 0 ? 0 : left < kEach ? static_cast<int>(left) : kEach;
    const bool whole = aligned && begin + kStep <= span.length;  // of all lanes
    // All loads are under way before the first is waited for.
    Tokens in[kInputs];
    RLK_UNROLL
    for (int i = 0; i < kInputs; ++i) {
      const PolicyTokens a = Terms::input(p, i);
      in[i] = broadcast<Tokens>(0.0f);
      if (a.data == nullptr) continue;
      const float* from = in_global(a.data) + offset_of(a, q, s, span);
      if (a.token_stride == 0) {
        in[i] = broadcast<Tokens>(*from);
      } else if (whole) {
        in[i] = Gpu::load(from + position);
      } else {
        RLK_UNROLL
        for (int j = 0; j < kEach; ++j) {
          if (j < count) token_of(in[i], j) = from[position + j];
        }
      }
    }
    const MaskOf<Tokens> taken = load_mask<MaskOf<Tokens>>(Terms::mask(now), mask_row + position, count);
    RLK_UNROLL
    for (int i = 0; i < kInputs; ++i) in[i] = select(taken, in[i], broadcast<Tokens>(0.0f));
    Tokens out[kOutputs];
    TokenSums<Tokens, kSums> sums;
    Terms::token(now, factors, in, taken, out, &sums);
    RLK_UNROLL
    for (int i = 0; i < kOutputs; ++i) {
      float* const to = in_global(Terms::output(p, i));
      if (to == nullptr) continue;
      if (whole) {
        Gpu::store(to + row + position, out[i]);
      } else {
        RLK_UNROLL
        for (int j = 0; j < kEach; ++j) {
          if (j < count) to[row + position + j] = token_of(out[i], j);
        }
      }
    }
    gathered.take(&sums);
  }
  return gathered.finish();
}

struct WaveResults {
  float sum[kMostTokenWaves][8];
  std::uint32_t count[kMostTokenWaves][kTokenCounts];
  float maximum[kMostTokenWaves][kTokenMaxima];
};

// The tile of a wave or of a block, `block` of the pass; `factors(sequence)` gives what its tokens share. Terms without
// sums need no partials and no memory of waves.
template <class Gpu, class Terms, class F>
RLK_DEVICE void token_tiles(const typename Terms::Params& p, TilePartial<8>* all_partials, std::int64_t slots, int tile,
                            std::int64_t block, WaveResults* of_waves, const F& factors) {
  constexpr int kWaves = kTokenWaves<Gpu>;
  TilePartial<8>* const partials = in_global(all_partials);
  const PolicySequences& q = Terms::sequences(p);
  const int thread = Gpu::thread(), wave = thread / Gpu::kLanes, lane = thread % Gpu::kLanes;
  const bool of_wave = tile == kWaveTile<Gpu>;
  const std::int64_t slot = of_wave ? block * kWaves + wave : block;
  if (slot >= slots) return;
  const std::int64_t s = sequence_of_slot(q, slot, tile);
  const PolicySpan span = span_of(q, s);
  std::int64_t first = (slot - first_slot(q, s, tile)) << tile;
  if (first >= span.length) {  // a slot that no tile has
    if (Terms::kSums > 0 && (of_wave ? lane == 0 : thread == 0)) partials[slot] = TilePartial<8>{};
    return;
  }
  const int steps = of_wave ? 1 : 1 << (tile - kLeastBlockTile<Gpu>);
  if (!of_wave) first += std::int64_t{wave} * steps * (Gpu::kLanes * kPerLane<Gpu>);
  const WaveTokens of = wave_tokens<Gpu, Terms>(p, factors(s), s, span, first, steps);
  if constexpr (Terms::kSums == 0) return;
  TilePartial<8>& to = partials[slot];
  if (of_wave) {
    if (lane < 8) to.sum[sum_index(lane)] = of.sum;
    if (lane == 0) {
      RLK_UNROLL
      for (int i = 0; i < kTokenCounts; ++i) to.count[i] = of.count[i];
      RLK_UNROLL
      for (int i = 0; i < kTokenMaxima; ++i) to.maximum[i] = of.maximum[i];
    }
    return;
  }
  if (lane < 8) of_waves->sum[wave][sum_index(lane)] = of.sum;
  if (lane == 0) {
    RLK_UNROLL
    for (int i = 0; i < kTokenCounts; ++i) of_waves->count[wave][i] = of.count[i];
    RLK_UNROLL
    for (int i = 0; i < kTokenMaxima; ++i) of_waves->maximum[wave][i] = of.maximum[i];
  }
  Gpu::barrier();
  if (thread < 8) {
    float x[kWaves];
    RLK_UNROLL
    for (int w = 0; w < kWaves; ++w) x[w] = of_waves->sum[w][thread];
    RLK_UNROLL
    for (int distance = 1; distance < kWaves; distance *= 2) {
      RLK_UNROLL
      for (int w = 0; w < kWaves; w += 2 * distance) x[w] = add_rn(x[w], x[w + distance]);
    }
    to.sum[thread] = x[0];
  } else if (thread < 8 + kTokenCounts) {
    std::uint32_t total = 0;
    RLK_UNROLL
    for (int w = 0; w < kWaves; ++w) total += of_waves->count[w][thread - 8];
    to.count[thread - 8] = total;
  } else if (thread >= 16 && thread < 16 + kTokenMaxima) {
    float most = 0.0f;
    RLK_UNROLL
    for (int w = 0; w < kWaves; ++w) most = maximum_of(most, of_waves->maximum[w][thread - 16]);
    to.maximum[thread - 16] = most;
  }
}

constexpr int kGatherLanes = 6, kGatherLeaves = 1 << kGatherLanes;  // tiles that a block reads at a time
constexpr int kGatherThreads = kGatherLeaves * 8;

struct GatheredSums {
  float node[kGatherLeaves][8];
  std::int64_t tiles[kGatherLeaves];
  float sum[kGatherLeaves][8];
  std::int64_t count[kGatherLeaves][kTokenCounts];
  float maximum[kGatherLeaves][kTokenMaxima];
};

// Sums of the sequences from block * (64 >> lanes) on, by their place in the block; 2^lanes tiles of each at a time.
template <class Gpu>
RLK_DEVICE void sums_of_sequences(const PolicySequences& q, int tile, int lanes, std::int64_t block,
                                  const TilePartial<8>* all_partials, GatheredSums* of) {
  const TilePartial<8>* const partials = in_global(all_partials);
  const int leaf = Gpu::thread() / 8, i = Gpu::thread() % 8;
  const int lane = leaf & ((1 << lanes) - 1), group = leaf >> lanes, groups = kGatherLeaves >> lanes;
  const std::int64_t s = block * groups + group;
  std::int64_t first = 0, tiles = 0;
  if (s < q.num_sequences) {
    first = first_slot(q, s, tile);
    tiles = tiles_of(span_of(q, s).length, tile);
  }
  if (i == 0 && lane == 0) of->tiles[group] = tiles;
  Gpu::barrier();
  std::int64_t longest = 0;
  for (int g = 0; g < groups; ++g) longest = longest > of->tiles[g] ? longest : of->tiles[g];
  SumTree<kTileLevels> tree;
  std::int64_t count = 0;
  float most = 0.0f;
#if defined(__CUDACC__) || defined(__HIP__)
#pragma unroll 1
#endif
  for (std::int64_t base = 0; base < longest; base += std::int64_t{1} << lanes) {
    const std::int64_t at = base + lane;
    float x = 0.0f;
    if (at < tiles) {
      const TilePartial<8>& partial = partials[first + at];
      x = partial.sum[i];
      if (i < kTokenCounts) count += partial.count[i];
      if (i < kTokenMaxima) most = maximum_of(most, partial.maximum[i]);
    }
    of->node[leaf][i] = x;
    for (int distance = 1; distance < 1 << lanes; distance *= 2) {
      Gpu::barrier();
      if (lane % (2 * distance) == 0) of->node[leaf][i] = add_rn(of->node[leaf][i], of->node[leaf + distance][i]);
    }
    if (lane == 0 && base < tiles) tree.take(of->node[leaf][i]);
    Gpu::barrier();
  }
  // Counts and maxima of a sequence's lanes; its sums are its first lane's.
  if (i < kTokenCounts) of->count[leaf][i] = count;
  if (i < kTokenMaxima) of->maximum[leaf][i] = most;
  Gpu::barrier();
  std::int64_t total = 0;
  float largest = 0.0f;
  if (lane == 0) {
    for (int l = 0; l < 1 << lanes; ++l) {
      if (i < kTokenCounts) total += of->count[leaf + l][i];
      if (i < kTokenMaxima) largest = maximum_of(largest, of->maximum[leaf + l][i]);
    }
  }
  Gpu::barrier();
  if (lane == 0) {
    of->sum[group][i] = tree.finish();
    if (i < kTokenCounts) of->count[group][i] = total;
    if (i < kTokenMaxima) of->maximum[group][i] = largest;
  }
  Gpu::barrier();
}
RLK_DEVICE SequenceSums<8> gathered(const GatheredSums& of, int group) {
  SequenceSums<8> sums;
  RLK_UNROLL
  for (int i = 0; i < 8; ++i) sums.sum[i] = of.sum[group][i];
  RLK_UNROLL
  for (int i = 0; i < kTokenCounts; ++i) sums.count[i] = of.count[group][i];
  RLK_UNROLL
  for (int i = 0; i < kTokenMaxima; ++i) sums.maximum[i] = of.maximum[group][i];
  return sums;
}

}  // namespace rlk
