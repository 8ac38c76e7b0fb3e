// Passes over tokens on GPUs of every vendor. A lane computes four neighbouring positions, or one position. Six
// shuffles add four sums by the tree over positions. The first two exchanges each halve the number of sums that a lane
// holds, so each lane ends with one sum.
//
// token_tiles computes the sums of tiles of positions. One wave processes a tile, or a block processes a tile of 2^tile
// >= 1024 positions and each of its waves processes consecutive positions. HBM bandwidth bounds this pass, which reads
// every array once. A lane reads all its tokens with one load if addresses allow it.
// sums_of_sequences computes the tree over the tiles of a sequence. A block processes several sequences.
//
// Gpu has
//   kLanes                          lanes of a wave
//   Tokens                          the tokens of a lane: Vec4 or float
//   first_argument(params), kReadsAgain   re-reads a kernel's first argument; kReadsAgain tells whether it does
//   thread(), barrier(), shuffle_xor, sum_over_wave, max_over_wave
//   load, store                     of Tokens or a Vec4, at multiples of their size
//   of_lane(address)                keeps an address out of scalar registers
//   count_on                        an atomic addition
//   kFewAtOnce                      whether few_totals loads all of its inputs before it uses any of them
#pragma once

#include <type_traits>

#include "kernels/tokens/terms.h"
#include "kernels/tokens/vec4.h"

namespace rlk {

constexpr int kTokenThreads = 256;

// What a token adds to a count is an integer, not a mask. Integers stay in vector registers. Masks would need more
// scalar registers than a wave on HIP has.
template <>
struct CountType<float> {
  using Type = int;
  static RLK_HD int of(bool mask) { return mask ? 1 : 0; }
};
template <>
struct CountType<Vec4> {
  using Type = int;
  static RLK_HD int of(const Vec4Mask& mask) { return -(mask.v[0] + mask.v[1] + mask.v[2] + mask.v[3]); }
};

constexpr int kMostSteps = 3;  // log2 of the largest number of steps in which a block computes a tile
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

RLK_DEVICE float& token_of(float& x, int) { return x; }
RLK_DEVICE float& token_of(Vec4& x, int i) { return x.v[i]; }
RLK_DEVICE bool& token_of(bool& x, int) { return x; }
RLK_DEVICE std::int32_t& token_of(Vec4Mask& x, int i) { return x.v[i]; }

template <class Mask>
constexpr int kMaskCount = sizeof(Mask) == sizeof(bool) ? 1 : kVec4;
// All ones if the element is not zero, else 0. On CUDA the code is inline assembly, so that the compiler does not see a
// comparison. The compiler would keep the result of a comparison in a predicate register, and there are only seven such
// registers.
template <class T>
RLK_DEVICE std::int32_t ones_unless_zero(T x) {
#if defined(__CUDA_ARCH__)
  std::int32_t ones;
  if constexpr (std::is_same_v<T, float>) {
    asm("set.neu.u32.f32 %0, %1, 0f00000000;" : "=r"(ones) : "f"(x));
  } else {
    asm("set.ne.u32.s32 %0, %1, 0;" : "=r"(ones) : "r"(static_cast<std::int32_t>(sizeof(T) == 8 ? x | x >> 32 : x)));
  }
  return ones;
#else
  return x != T{0} ? -1 : 0;
#endif
}
// Loads the mask of a lane's tokens. kWhole: all tokens exist, and the address is a multiple of 16 bytes or of the
// tokens' total size. A token is unmasked if its element has any of the bits `bits`.
template <class Mask, bool kWhole, class T>
RLK_DEVICE Mask mask_of_elements(const T* from, int count, T bits) {
  Mask m;
  constexpr int kCount = kMaskCount<Mask>;
  constexpr unsigned kBytes = sizeof(T) * kCount;
  const auto counted = [&](T x) { return ones_unless_zero(static_cast<T>(sizeof(T) == 1 ? x : x & bits)); };
  if constexpr (kWhole) {
    constexpr int kVectors = kBytes > 16 ? kBytes / 16 : 1, kEach = kCount / kVectors;
    struct alignas(kEach * sizeof(T)) Part {
      T v[kEach];
    };
    RLK_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const Part part = reinterpret_cast<const Part*>(from)[i];
      RLK_UNROLL
      for (int j = 0; j < kEach; ++j) token_of(m, i * kEach + j) = counted(part.v[j]);
    }
  } else {
    RLK_UNROLL
    for (int i = 0; i < kCount; ++i) token_of(m, i) = i < count ? counted(from[i]) : 0;
  }
  return m;
}
template <class Mask, bool kWhole>
RLK_DEVICE Mask load_mask(const TokenMask& mask, const unsigned char* at, int count) {
  const auto elements = [&](auto zero) {
    using T = decltype(zero);
    return mask_of_elements<Mask, kWhole>(reinterpret_cast<const T*>(at), count, mask.bits<T>());
  };
  switch (mask.bytes) {
    case 1:
      return elements(std::uint8_t{0});
    case 2:
      return elements(std::uint16_t{0});
    case 4:
      return elements(std::uint32_t{0});
    case 8:
      return elements(std::uint64_t{0});
    default:
      break;
  }
  Mask m;
  RLK_UNROLL
  for (int i = 0; i < kMaskCount<Mask>; ++i) token_of(m, i) = i < count ? -1 : 0;
  return m;
}

// The index of the sum that a lane holds after four sums over a wave's lanes.
RLK_HD int sum_index(int lane) { return (lane & 1) << 1 | (lane >> 1 & 1); }
template <class Gpu, int kDistance, int kHalf, class Of>
RLK_DEVICE void exchange(float (&x)[kLowerSums], const Of& of) {
  const bool upper = (Gpu::thread() & kDistance) != 0;
  RLK_UNROLL
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? x[i] : x[i + kHalf], kept = upper ? x[i + kHalf] : x[i];
    x[i] = of(kept, Gpu::shuffle_xor(sent, kDistance));
  }
}
// Reduces four values over the lanes of a wave. `of` is an addition or another commutative operation.
template <class Gpu, class Of>
RLK_DEVICE float scattered(float (&x)[kLowerSums], const Of& of) {
  exchange<Gpu, 1, 2>(x, of);
  exchange<Gpu, 2, 1>(x, of);
  RLK_UNROLL
  for (int distance = 4; distance < Gpu::kLanes; distance *= 2) x[0] = of(x[0], Gpu::shuffle_xor(x[0], distance));
  return x[0];
}
template <class Gpu>
RLK_DEVICE float scattered_sum(float (&x)[kLowerSums]) {
  return scattered<Gpu>(x, [](float a, float b) { return add_rn(a, b); });
}

// Computes four sums over the tokens of all lanes in a step. Returns the sum that belongs to this lane (sum_index).
template <class Gpu>
RLK_DEVICE float sum_of_step(typename Gpu::Tokens* sum) {
  constexpr int kEach = kPerLane<Gpu>;
  float of_lane[kLowerSums];
  RLK_UNROLL
  for (int i = 0; i < kLowerSums; ++i) {
    RLK_UNROLL
    for (int distance = 1; distance < kEach; distance *= 2) {
      RLK_UNROLL
      for (int j = 0; j < kEach; j += 2 * distance) {
        token_of(sum[i], j) = add_rn(token_of(sum[i], j), token_of(sum[i], j + distance));
      }
    }
    of_lane[i] = token_of(sum[i], 0);
  }
  return scattered_sum<Gpu>(of_lane);
}

// The results of a wave for its positions: the sums that belong to this lane, and all counts and maxima.
struct WaveTokens {
  float sum[2];  // sum[0] is one of the first four sums, and sum[1] is one of the last four
  std::uint32_t count[kTokenCounts];
  float maximum[kTokenMaxima];
};

// The sums over the steps of a wave. A step has one Tokens per lane. Call take() for each step, then finish().
template <class Gpu, int kSums, bool kHasSums, int kMaxima>
class WaveSums {
 public:
  RLK_DEVICE void take(TokenSums<typename Gpu::Tokens, kSums>* sums, bool upper) {
    static_assert(kSums == 2 * kLowerSums);
    constexpr int kEach = kPerLane<Gpu>;
    if constexpr (kHasSums) lower_.take(sum_of_step<Gpu>(sums->sum));
    if (upper) upper_.take(sum_of_step<Gpu>(sums->sum + kLowerSums));
    RLK_UNROLL
    for (int i = 0; i < kTokenCounts; ++i) counts_[i] += static_cast<int>(sums->count[i]);
    RLK_UNROLL
    for (int j = 0; j < kEach; ++j) {
      RLK_UNROLL
      for (int i = 0; i < kMaxima; ++i) {
        const auto bits = static_cast<std::uint32_t>(bits_of(token_of(sums->maximum[i], j)));
        most_[i] = most_[i] > bits ? most_[i] : bits;
      }
    }
  }
  RLK_DEVICE WaveTokens finish() const {
    WaveTokens of = {};
    of.sum[0] = lower_.finish();
    of.sum[1] = upper_.finish();
    RLK_UNROLL
    for (int i = 0; i < kTokenCounts; i += 2) {  // Two counts share a word, because counts of a wave are below 2^16.
      const std::uint32_t both = Gpu::sum_over_wave(static_cast<std::uint32_t>(counts_[i] | counts_[i + 1] << 16));
      of.count[i] = both & 0xffff;
      of.count[i + 1] = both >> 16;
    }
    RLK_UNROLL
    for (int i = 0; i < kMaxima; ++i) of.maximum[i] = float_of(static_cast<std::int32_t>(Gpu::max_over_wave(most_[i])));
    return of;
  }

 private:
  SumTree<kMostSteps + 1> lower_, upper_;
  int counts_[kTokenCounts] = {};
  // the bits of floats that are not negative; as integers the bits have the order of the floats, and NaNs are largest
  std::uint32_t most_[kMaxima] = {};
};
template <class Gpu, int kMaxima>
class WaveSums<Gpu, 0, true, kMaxima> {
 public:
  RLK_DEVICE void take(TokenSums<typename Gpu::Tokens, 0>*, bool) {}
  RLK_DEVICE WaveTokens finish() const { return {}; }
};

// The address in each array at which this lane begins. The addresses are integers, because HIP's compiler would have to
// assume that pointers may point into LDS.
template <class Gpu, class Terms>
struct LaneArrays {
  using Params = typename Terms::Params;
  std::uintptr_t input[Terms::kInputs], mask, output[Terms::kOutputs];
  int mask_bytes;  // bytes per mask element
  // bit i of `given`: input i is given; of `shared`: input i has one value per sequence; of `wanted`: output i is
  // wanted
  unsigned given = 0, shared = 0, wanted = 0;

  // The words `given`, `shared` and `wanted` stay in registers over a wave's steps. On a GPU with too few scalar
  // registers (kReadsAgain), each use reads the params again.
  RLK_DEVICE bool is_given(const Params& p, int i) const {
    return Gpu::kReadsAgain ? Terms::input(p, i).data != nullptr : (given >> i & 1) != 0;
  }
  RLK_DEVICE bool is_shared(const Params& p, int i) const {
    return Gpu::kReadsAgain ? Terms::input(p, i).token_stride == 0 : (shared >> i & 1) != 0;
  }
  RLK_DEVICE bool is_wanted(const Params& p, int i) const {
    return Gpu::kReadsAgain ? Terms::output(p, i) != nullptr : (wanted >> i & 1) != 0;
  }
};
template <class T>
RLK_DEVICE T* at_address(std::uintptr_t address) {
#if defined(__HIP_DEVICE_COMPILE__)
  return (T*)(__attribute__((address_space(1))) T*)address;
#else
  return in_global(reinterpret_cast<T*>(address));
#endif
}
// kWhole: all tokens of the wave exist, and their arrays are aligned. This function only issues loads, so that all
// loads are in flight before the first wait.
template <class Gpu, class Terms, bool kWhole>
RLK_DEVICE MaskOf<typename Gpu::Tokens> load_inputs(const typename Terms::Params& p, const LaneArrays<Gpu, Terms>& at,
                                                    int offset, int count, typename Gpu::Tokens (&in)[Terms::kInputs]) {
  using Tokens = typename Gpu::Tokens;
  RLK_UNROLL
  for (int i = 0; i < Terms::kInputs; ++i) {
    in[i] = broadcast<Tokens>(0.0f);
    if (!at.is_given(p, i)) continue;
    const float* const from = at_address<const float>(at.input[i]);
    if (at.is_shared(p, i)) {
      in[i] = broadcast<Tokens>(*from);
    } else if constexpr (kWhole) {
      in[i] = Gpu::load(from + offset);
    } else {
      RLK_UNROLL
      for (int j = 0; j < kPerLane<Gpu>; ++j) {
        if (j < count) token_of(in[i], j) = from[offset + j];
      }
    }
  }
  const TokenMask& mask = Terms::mask(p);
  const auto* const from = at_address<const unsigned char>(at.mask);
  return load_mask<MaskOf<Tokens>, kWhole>(mask, from + offset * at.mask_bytes, count);
}

// Computes the tokens of a wave: `steps` * kLanes * kPerLane positions of sequence s, from `first` on.
template <class Gpu, class Terms>
RLK_DEVICE WaveTokens wave_tokens(const typename Terms::Params& p, const typename Terms::Factors& factors,
                                  std::int64_t s, const TokenSpan& span, std::int64_t first, int steps) {
  using Tokens = typename Gpu::Tokens;
  constexpr int kInputs = Terms::kInputs, kOutputs = Terms::kOutputs, kSums = Terms::kSums, kEach = kPerLane<Gpu>;
  constexpr int kStep = Gpu::kLanes * kEach;
  constexpr unsigned kBytes = sizeof(Tokens);
  const Sequences& q = Terms::sequences(p);
  const int lane = Gpu::thread() % Gpu::kLanes;
  const TokenMask& mask = Terms::mask(p);
  const std::int64_t position = first + lane * kEach;
  const std::int64_t to = (q.packed() ? span.begin : s * q.num_tokens) + position;
  const std::int64_t mask_at = (q.packed() ? span.begin : s * mask.row_stride) + position;
  bool aligned = true;  // whether all arrays of tokens are aligned in this sequence
  LaneArrays<Gpu, Terms> at;
  RLK_UNROLL
  for (int i = 0; i < kInputs; ++i) {
    const PolicyTokens a = Terms::input(p, i);
    const bool shared = a.token_stride == 0;
    at.input[i] = reinterpret_cast<std::uintptr_t>(a.data) + (offset_of(a, q, s, span) + (shared ? 0 : position)) * 4;
    if (a.data == nullptr) continue;
    at.given |= 1u << i;
    if (shared) at.shared |= 1u << i;
    aligned = aligned && (shared || at.input[i] % kBytes == 0);
  }
  at.mask_bytes = mask.bytes;
  at.mask = reinterpret_cast<std::uintptr_t>(mask.data) + mask_at * at.mask_bytes;
  const int mask_vector = at.mask_bytes * kEach;
  aligned = aligned && (at.mask & ((mask_vector < 16 ? mask_vector : 16) - 1)) == 0;
  RLK_UNROLL
  for (int i = 0; i < kOutputs; ++i) {
    float* const data = Terms::output(p, i);
    at.output[i] = reinterpret_cast<std::uintptr_t>(data) + to * 4;
    if (data == nullptr) continue;
    at.wanted |= 1u << i;
    aligned = aligned && at.output[i] % kBytes == 0;
  }
  RLK_UNROLL
  for (int i = 0; i < kInputs; ++i) at.input[i] = Gpu::of_lane(at.input[i]);
  RLK_UNROLL
  for (int i = 0; i < kOutputs; ++i) at.output[i] = Gpu::of_lane(at.output[i]);
  at.mask = Gpu::of_lane(at.mask);
  // Number of steps with a token, and number of steps whose lanes all have aligned tokens.
  const std::int64_t rest = span.length - first;
  const int left = rest < steps * kStep ? static_cast<int>(rest) : steps * kStep;
  const int last = (left + kStep - 1) / kStep, whole_steps = aligned ? left / kStep : 0;
  WaveSums<Gpu, kSums, Terms::kHasSums, Terms::kMaxima> gathered;
  RLK_UNROLL_NOT
  for (int step = 0; step < last; ++step) {
    const typename Terms::Params& now = Gpu::first_argument(p);
    const int offset = step * kStep;
    const bool whole = step < whole_steps;
    Tokens in[kInputs];
    MaskOf<Tokens> taken;
    int count = kEach;
    if (whole) {
      taken = load_inputs<Gpu, Terms, true>(now, at, offset, kEach, in);
    } else {
      count = left - (offset + lane * kEach);
      count = count < 0 ? 0 : count < kEach ? count : kEach;
      taken = load_inputs<Gpu, Terms, false>(now, at, offset, count, in);
    }
    RLK_UNROLL
    for (int i = 0; i < kInputs; ++i) {
      if (at.is_given(now, i)) in[i] = where(taken, in[i]);
    }
    Tokens out[kOutputs];
    TokenSums<Tokens, kSums> sums;
    token_at<Terms>(now, factors, in, taken, out, &sums, position + offset);
    RLK_UNROLL
    for (int i = 0; i < kOutputs; ++i) {
      if (!at.is_wanted(now, i)) continue;
      float* const of = at_address<float>(at.output[i]) + offset;
      if (whole) {
        Gpu::store(of, out[i]);
      } else {
        RLK_UNROLL
        for (int j = 0; j < kEach; ++j) {
          if (j < count) of[j] = token_of(out[i], j);
        }
      }
    }
    gathered.take(&sums, Terms::sums_upper(now));
  }
  WaveTokens of = gathered.finish();
  if constexpr (kSums > 0) {
    if (!Terms::sums_upper(p)) of.sum[1] = Terms::upper_sum(kLowerSums + sum_index(lane), of.count[0]);
  }
  return of;
}

struct WaveResults {
  float sum[kMostTokenWaves][8];
  std::uint32_t count[kMostTokenWaves][kTokenCounts];
  float maximum[kMostTokenWaves][kTokenMaxima];
};

// A wave computes the function sequence_of_slot() by a search in which each lane reads one offset per step.
template <class Gpu>
RLK_DEVICE std::int64_t find_sequence(const Sequences& q, std::int64_t slot, int tile) {
  if (!q.packed()) return sequence_of_slot(q, slot, tile);
  const int lane = Gpu::thread() % Gpu::kLanes;
  std::int64_t low = 0, high = slotted_sequences(q);  // first_slot(low) <= slot < first_slot(high)
  while (high - low > 1) {
    const auto each = static_cast<std::int64_t>(static_cast<std::uint32_t>(high - low + Gpu::kLanes) /
                                                static_cast<std::uint32_t>(Gpu::kLanes + 1));
    const std::int64_t looked_at = low + (lane + 1) * each;
    const bool begun = looked_at < high && first_slot(q, looked_at, tile) <= slot;
    low += Gpu::sum_over_wave(begun ? 1u : 0u) * each;
    high = high < low + each ? high : low + each;
  }
  return low;
}

// Writes the partial result of a tile. of_wave: this wave has computed the whole tile. Without of_wave, the waves of a
// block combine their results in the array of_waves. kFewAtOnce: a later pass reads whole vectors, so the function also
// writes the padding of the partial result.
template <class Gpu>
RLK_DEVICE void store_tile(const WaveTokens& of, bool of_wave, TilePartial<8>* partial, WaveResults* of_waves) {
  constexpr int kWaves = kTokenWaves<Gpu>;
  constexpr int kUsedWords = 8 + kTokenCounts + kTokenMaxima, kWords = sizeof(TilePartial<8>) / 4;
  const int thread = Gpu::thread(), wave = thread / Gpu::kLanes, lane = thread % Gpu::kLanes;
  TilePartial<8>& to = *partial;
  if constexpr (Gpu::kFewAtOnce) {
    const int word = kUsedWords + (of_wave ? lane : thread);
    if (word < kWords) reinterpret_cast<std::uint32_t*>(partial)[word] = 0;
  }
  if (of_wave) {
    if (lane < kLowerSums) {
      to.sum[sum_index(lane)] = of.sum[0];
      to.sum[kLowerSums + sum_index(lane)] = of.sum[1];
    }
    if (lane == 0) {
      RLK_UNROLL
      for (int i = 0; i < kTokenCounts; ++i) to.count[i] = of.count[i];
      RLK_UNROLL
      for (int i = 0; i < kTokenMaxima; ++i) to.maximum[i] = of.maximum[i];
    }
    return;
  }
  if (lane < kLowerSums) {
    of_waves->sum[wave][sum_index(lane)] = of.sum[0];
    of_waves->sum[wave][kLowerSums + sum_index(lane)] = of.sum[1];
  }
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

// `threads` threads clear the outputs of packed tokens outside every sequence.
template <class Gpu, class Terms>
RLK_DEVICE void clear_tokens(const typename Terms::Params& p, std::int64_t first, int count, int thread, int threads) {
  RLK_UNROLL
  for (int i = 0; i < Terms::kOutputs; ++i) {
    float* const data = Terms::output(p, i);
    if (data == nullptr) continue;
    RLK_UNROLL_NOT
    for (int t = thread; t < count; t += threads) in_global(data)[first + t] = Terms::rest();
  }
}

// The work of block `block` of the pass: a tile, or a tile per wave. factors(sequence) returns the values that a
// sequence's tokens share. Terms without sums need no memory for partial results and no shared memory.
template <class Gpu, class Terms, class F>
RLK_DEVICE void token_tiles(const typename Terms::Params& p, TilePartial<8>* all_partials, std::int64_t slots, int tile,
                            std::int64_t block, WaveResults* of_waves, const F& factors) {
  constexpr int kWaves = kTokenWaves<Gpu>;
  TilePartial<8>* const partials = in_global(all_partials);
  const Sequences& q = Terms::sequences(p);
  const int thread = Gpu::thread(), wave = thread / Gpu::kLanes, lane = thread % Gpu::kLanes;
  const bool of_wave = tile == kWaveTile<Gpu>;
  const std::int64_t slot = of_wave ? block * kWaves + wave : block;
  if (slot >= slots) return;
  const std::int64_t s = find_sequence<Gpu>(q, slot, tile);
  const TokenSpan span = slotted_span(q, s);
  std::int64_t first = (slot - first_slot(q, s, tile)) << tile;
  if constexpr (Terms::kMayBePacked) {
    if (q.packed() && is_rest(q, s)) {
      const std::int64_t left = span.length - first;
      const int count = left <= 0 ? 0 : left < 1 << tile ? static_cast<int>(left) : 1 << tile;
      const int threads = of_wave ? Gpu::kLanes : kTokenThreads;
      return clear_tokens<Gpu, Terms>(p, span.begin + first, count, of_wave ? lane : thread, threads);
    }
  }
  if (first >= span.length) {  // a slot without a tile
    if (Terms::kSums > 0 && (of_wave ? lane == 0 : thread == 0)) partials[slot] = TilePartial<8>{};
    return;
  }
  const int steps = of_wave ? 1 : 1 << (tile - kLeastBlockTile<Gpu>);
  if (!of_wave) first += std::int64_t{wave} * steps * (Gpu::kLanes * kPerLane<Gpu>);
  const WaveTokens of = wave_tokens<Gpu, Terms>(p, factors(s), s, span, first, steps);
  if constexpr (Terms::kSums > 0) store_tile<Gpu>(of, of_wave, &partials[slot], of_waves);
}

constexpr int kGatherLanes = 6, kGatherLeaves = 1 << kGatherLanes;  // tiles that a block reads at a time
constexpr int kGatherThreads = kGatherLeaves * 8;
constexpr int kMostGatherWaves = kGatherThreads / 32;
template <class Gpu>
constexpr int kGatherWaves = kGatherThreads / Gpu::kLanes;

struct GatheredSums {
  float node[kMostGatherWaves][8];
  std::int64_t node_count[kMostGatherWaves][kTokenCounts];
  float node_maximum[kMostGatherWaves][kTokenMaxima];
  std::uint32_t rounds[kMostGatherWaves];
  float sum[kGatherLeaves][8];
  std::int64_t count[kGatherLeaves][kTokenCounts];
  float maximum[kGatherLeaves][kTokenMaxima];
};

template <class Gpu>
RLK_DEVICE std::int64_t shuffle_xor(std::int64_t x, int distance) {
  const auto half = [&](std::int64_t bits) {
    const float other = Gpu::shuffle_xor(float_of(static_cast<std::int32_t>(bits)), distance);
    return static_cast<std::int64_t>(static_cast<std::uint32_t>(bits_of(other)));
  };
  return half(x >> 32) << 32 | half(x);
}

// Computes the sums of 64 >> lanes sequences, from sequence block * (64 >> lanes) on. Results in `of` are indexed by
// the sequence's place in the block. A block reads 2^lanes tiles of each sequence at a time, and eight threads read a
// tile. Shuffles add the part of the tree that lies in a wave. If several waves read a sequence, they exchange the
// tree's nodes through `of`.
template <class Gpu>
RLK_DEVICE void sums_of_sequences(const Sequences& q, int tile, int lanes, std::int64_t block,
                                  const TilePartial<8>* all_partials, GatheredSums* of) {
  constexpr int kWaves = kGatherWaves<Gpu>, kWaveLeaves = Gpu::kLanes / 8;
  const TilePartial<8>* const partials = in_global(all_partials);
  const int leaf = Gpu::thread() / 8, i = Gpu::thread() % 8, wave = Gpu::thread() / Gpu::kLanes;
  const int lane = leaf & ((1 << lanes) - 1), group = leaf >> lanes, groups = kGatherLeaves >> lanes;
  const int in_wave = 1 << lanes < kWaveLeaves ? 1 << lanes : kWaveLeaves, waves = (1 << lanes) / in_wave;
  const int first_wave = wave & ~(waves - 1);  // first wave of the sequence
  const std::int64_t s = block * groups + group;
  std::int64_t first = 0, tiles = 0;
  if (s < q.num_sequences) {
    first = first_slot(q, s, tile);
    tiles = tiles_of(span_of(q, s).length, tile);
  }
  std::uint32_t rounds = Gpu::max_over_wave(static_cast<std::uint32_t>((tiles + (1 << lanes) - 1) >> lanes));
  if (waves > 1) {
    of->rounds[wave] = rounds;
    Gpu::barrier();
    RLK_UNROLL
    for (int w = 0; w < kWaves; ++w) rounds = rounds > of->rounds[w] ? rounds : of->rounds[w];
  }
  SumTree<kTileLevels> tree;
  std::int64_t count = 0;
  float most = 0.0f, x = 0.0f;
  RLK_UNROLL_NOT
  for (std::uint32_t round = 0; round < rounds; ++round) {
    const std::int64_t base = static_cast<std::int64_t>(round) << lanes, at = base + lane;
    x = 0.0f;
    if (at < tiles) {
      const TilePartial<8>& partial = partials[first + at];
      x = partial.sum[i];
      if (i < kTokenCounts) count += partial.count[i];
      if (i < kTokenMaxima) most = maximum_of(most, partial.maximum[i]);
    }
    for (int distance = 1; distance < in_wave; distance *= 2) x = add_rn(x, Gpu::shuffle_xor(x, 8 * distance));
    if (waves > 1) {
      of->node[wave][i] = x;
      Gpu::barrier();
      float node[kWaves];
      RLK_UNROLL
      for (int w = 0; w < kWaves; ++w) node[w] = w < waves ? of->node[first_wave + w][i] : 0.0f;
      RLK_UNROLL
      for (int distance = 1; distance < kWaves; distance *= 2) {
        RLK_UNROLL
        for (int w = 0; w < kWaves; w += 2 * distance) node[w] = add_rn(node[w], node[w + distance]);
      }
      x = node[0];
      Gpu::barrier();
    }
    if (rounds > 1 && base < tiles) tree.take(x);
  }
  if (rounds > 1) x = tree.finish();
  for (int distance = 1; distance < in_wave; distance *= 2) {
    count += shuffle_xor<Gpu>(count, 8 * distance);
    most = maximum_of(most, Gpu::shuffle_xor(most, 8 * distance));
  }
  if (waves > 1) {
    if (i < kTokenCounts) of->node_count[wave][i] = count;
    if (i < kTokenMaxima) of->node_maximum[wave][i] = most;
    Gpu::barrier();
    count = 0;
    for (int w = 0; w < waves; ++w) {
      if (i < kTokenCounts) count += of->node_count[first_wave + w][i];
      if (i < kTokenMaxima) most = maximum_of(most, of->node_maximum[first_wave + w][i]);
    }
  }
  if (lane == 0) {
    of->sum[group][i] = x;
    if (i < kTokenCounts) of->count[group][i] = count;
    if (i < kTokenMaxima) of->maximum[group][i] = most;
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
