// A sequence's mask in a GPU's shared memory, for a block of kTokenThreads threads. The block loads one stretch of
// kStretch positions at a time. Each position has a bit, which is set if the token is unmasked. Each word has the
// number of bits that are set before the word. Two look-ups therefore give the number of unmasked tokens between any
// two positions.
#pragma once

#include "kernels/advantages/reward_sequence.h"
#include "kernels/packing/flag_words.h"

namespace rlk {

constexpr int kStretch = 1 << 15;  // positions that a block holds at a time
constexpr int kStretchWords =
    kStretch / 32 + 2;  // the first word may begin with unused bits, and a word of zeros follows the last word

RLK_DEVICE std::uint32_t bits_set(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(__popc(bits));
#else
  return static_cast<std::uint32_t>(__builtin_popcount(bits));
#endif
}
// `bits` must not be 0.
RLK_DEVICE int highest_bit(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(static_cast<int>(bits));
#else
  return 31 - __builtin_clz(bits);
#endif
}
// Returns one bit for each of sixteen flags.
RLK_DEVICE std::uint32_t bits_of_flags(const Vec4& flags) {
  std::uint32_t bits = 0;
  RLK_UNROLL
  for (int i = 0; i < kVec4; ++i) bits |= bytes_not_zero(static_cast<std::uint32_t>(bits_of(flags.v[i]))) << 4 * i;
  return bits;
}

struct MaskShared {
  std::uint32_t bits[kStretchWords];    // set for each unmasked position
  std::uint32_t before[kStretchWords];  // number of set bits in earlier words
  std::uint32_t set[kMostTokenWaves];   // number of set bits in a wave's words
  std::int32_t last;                    // last bit that is set
};

template <class Gpu>
class MaskStretch {
 public:
  int begin = 0, tokens = 0;  // first position of the stretch within the sequence, and number of positions

  // mask_at is the index of the sequence's first flag in the mask.
  RLK_DEVICE MaskStretch(std::int64_t mask_at, int length, MaskShared* shared)
      : mask_at_(mask_at), length_(length), shared_(shared) {}

  // Before a call of load(), all threads must have finished reading the previous stretch. meanwhile() runs while the
  // loads are in flight.
  template <class Meanwhile>
  RLK_DEVICE void load(const TokenMask& mask, int stretch, const Meanwhile& meanwhile) {
    load_bits(mask, stretch);
    meanwhile();
    index_bits();
  }

  RLK_DEVICE int counted() const { return static_cast<int>(shared_->before[words()]); }
  // The last unmasked position of the stretch, as a position of the sequence. Valid only if there is one.
  RLK_DEVICE int last_counted() const { return begin + shared_->last - off_; }
  // The number of unmasked tokens in this stretch before a position of the sequence.
  RLK_DEVICE std::uint32_t counted_before(int position) const {
    int at = position - begin;
    at = (at < 0 ? 0 : at < tokens ? at : tokens) + off_;
    const std::uint32_t below = (1u << (at & 31)) - 1;
    return shared_->before[at >> 5] + bits_set(shared_->bits[at >> 5] & below);
  }
  // The bits of 32 positions from `at` on. `at` must be a position of the stretch. Bits past the stretch's end have no
  // meaning.
  RLK_DEVICE std::uint32_t bits_from(int at) const {
    const int from = at + off_;
    const std::uint64_t two = shared_->bits[from >> 5] | std::uint64_t{shared_->bits[(from >> 5) + 1]} << 32;
    return static_cast<std::uint32_t>(two >> (from & 31));
  }
  // One bit for each of four positions of the stretch from `at` on, where `at` >= -3.
  RLK_DEVICE std::uint32_t counted_of(int at) const {
    const int skipped = at < 0 ? -at : 0;
    return bits_from(at + skipped) << skipped & 15;
  }

 private:
  static constexpr int kAhead = 2;  // number of vectors of flags that a thread loads before it uses any of them

  // The index is kept in a vector register. Wave-uniform values that depend on it would otherwise need more SGPRs than
  // there are.
  static RLK_DEVICE int thread() { return static_cast<int>(Gpu::of_lane(static_cast<std::uintptr_t>(Gpu::thread()))); }

  RLK_DEVICE void load_bits(const TokenMask& mask, int stretch) {
    begin = stretch * kStretch;
    tokens = length_ - begin < kStretch ? length_ - begin : kStretch;
    // This copy tells HIP's compiler that the flags are in global memory, which the compiler would not know from the
    // reference alone.
    const TokenMask flags = mask;
    with_flag_bytes(flags, [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      const FlagsFrom<kBytes, GlobalMemory> from(flags, mask_at_ + begin);
      off_ = kBytes == 1 ? static_cast<int>(reinterpret_cast<std::uintptr_t>(from.flags) % 16) : 0;
      load_halves<kBytes>(from);
    });
  }
  template <int kBytes, class Flags>
  RLK_DEVICE void load_halves(const Flags& flags) const {
    const int halves = 2 * (words() + 1);
    RLK_UNROLL_NOT
    for (int first = thread(); first < halves; first += kAhead * kTokenThreads) {
      Vec4 loaded[kAhead];
      RLK_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int at = 16 * (first + k * kTokenThreads) - off_;
        if (kBytes == 1 && is_whole(at)) loaded[k] = load_flags(flags, at);
      }
      RLK_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int half = first + k * kTokenThreads, at = 16 * half - off_;
        if (half >= halves) continue;
        const auto bits = static_cast<std::uint16_t>(kBytes == 1 && is_whole(at) ? bits_of_flags(loaded[k])
                                                                                 : bits_between<kBytes>(flags, at));
        __builtin_memcpy(reinterpret_cast<char*>(shared_->bits) + 2 * half, &bits, sizeof bits);
      }
    }
  }
  RLK_DEVICE bool is_whole(int at) const { return at >= 0 && at + 16 <= tokens; }
  template <class Flags>
  static RLK_DEVICE Vec4 load_flags(const Flags& flags, int at) {
    return Gpu::load_vec4(reinterpret_cast<const float*>(in_global(flags.flags + at)));
  }
  // The bits of 16 positions, for the cases that vector loads cannot read: some positions may lie outside the stretch,
  // or flags may be wider than a byte.
  template <int kBytes, class Flags>
  RLK_DEVICE std::uint32_t bits_between(const Flags& flags, int at) const {
    if constexpr (kBytes == 0) {
      const int left = tokens - at;
      return left <= 0 ? 0 : left < 16 ? (1u << left) - 1 : 0xffff;
    }
    std::uint32_t bits = 0;
    RLK_UNROLL_NOT
    for (int i = 0; i < 16; i += 4) {
      typename Flags::Flag flag[4];
      RLK_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int position = at + i + j;
        flag[j] = 0;
        if (position >= 0 && position < tokens) flag[j] = flags.load(position);
      }
      RLK_UNROLL
      for (int j = 0; j < 4; ++j) bits |= (flags.counts(flag[j]) ? 1u : 0u) << (i + j);
    }
    return bits;
  }
  RLK_DEVICE int words() const { return (off_ + tokens + 31) / 32; }

  static RLK_DEVICE std::uint32_t exchanged(std::uint32_t x, int distance) {
    return static_cast<std::uint32_t>(bits_of(Gpu::shuffle_xor(float_of(static_cast<std::int32_t>(x)), distance)));
  }
  // Counts the bits that are set before each word and in all words, and finds the last set bit.
  RLK_DEVICE void index_bits() {
    const int words = this->words(), each = (words + kTokenThreads - 1) / kTokenThreads;
    const int low = thread() * each, high = low + each < words ? low + each : words;
    const int lane = thread() % Gpu::kLanes, wave = thread() / Gpu::kLanes;
    Gpu::barrier();
    std::uint32_t mine = 0;
    RLK_UNROLL_NOT
    for (int word = low; word < high; ++word) mine += bits_set(shared_->bits[word]);
    std::uint32_t set = mine, before = 0;
    for (int distance = 1; distance < Gpu::kLanes; distance *= 2) {
      const std::uint32_t other = exchanged(set, distance);
      before += (lane & distance) != 0 ? other : 0;
      set += other;
    }
    if (lane == 0) shared_->set[wave] = set;
    Gpu::barrier();
    const std::uint32_t of_lane = lane < kTokenWaves<Gpu> ? shared_->set[lane] : 0;
    const std::uint32_t all = Gpu::sum_over_wave(of_lane);
    before += Gpu::sum_over_wave(lane < wave ? of_lane : 0);
    const bool has_last = mine > 0 && before + mine == all;
    RLK_UNROLL_NOT
    for (int word = low; word < high; ++word) {
      const std::uint32_t bits = shared_->bits[word];
      shared_->before[word] = before;
      before += bits_set(bits);
      if (has_last && bits != 0) shared_->last = 32 * word + highest_bit(bits);
    }
    if (thread() == 0) shared_->before[words] = all;
    Gpu::barrier();
  }

  std::int64_t mask_at_;
  int length_, off_ = 0;  // off_: index of the bit of the stretch's first position
  MaskShared* shared_;
};

}  // namespace rlk
