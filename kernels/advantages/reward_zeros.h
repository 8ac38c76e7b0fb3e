// The pass over tokens of scatter_rewards if tokens have neither a reward of their own nor a KL term. The pass writes 0
// to each token. The pass writes NaN instead if a sequence's offsets are bad or the Lagrange weight is negative or not
// finite. HBM bandwidth bounds this pass, which reads one byte of mask per token, and writes outputs as whole vectors
// wherever a sequence begins.
#pragma once

#include "kernels/advantages/reward_sequence.h"
#include "kernels/packing/flag_words.h"

namespace rlk {

// Whether this pass can compute a call, given the tile of a block.
template <class Gpu>
bool are_blank(const ScatterRewardsParams& p, int tile) {
  const bool bytes = p.mask.bytes <= 1;
  return bytes && p.token_rewards.data == nullptr && p.spec.kl == KlEstimator::kNone && tile != kWaveTile<Gpu>;
}

// `count` is the number of a tile's unmasked tokens. `after` is the index of the last of them, plus one.
struct CountedTokens {
  std::uint32_t count = 0, after = 0;

  RLK_DEVICE void take(std::uint8_t flag, int index) {
    if (flag == 0) return;
    ++count;
    at_least(index + 1);
  }
  // Counts sixteen flags, the first at `index`.
  RLK_DEVICE void take(const Vec4& flags, int index) {
    RLK_UNROLL
    for (int i = 0; i < kVec4; ++i) {
      const std::uint32_t top = tops_not_zero(static_cast<std::uint32_t>(bits_of(flags.v[i])));
      count += (top >> 7) * 0x01010101u >> 24;
      const int last = top >> 31 != 0 ? 4 : top >> 23 != 0 ? 3 : top >> 15 != 0 ? 2 : 1;
      if (top != 0) at_least(index + 4 * i + last);
    }
  }

 private:
  RLK_DEVICE void at_least(int index) {
    const auto other = static_cast<std::uint32_t>(index);
    after = after > other ? after : other;
  }
};

// Splits an array of `count` elements, each `bytes` long, into aligned vectors of 16 bytes, `head` elements before the
// vectors, and the elements after the vectors.
struct VectorRun {
  int head, vectors;
  RLK_DEVICE VectorRun(const void* from, int count, int bytes) {
    const int each = 16 / bytes, off = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 16) / bytes;
    head = off == 0 ? 0 : each - off;
    head = head < count ? head : count;
    vectors = (count - head) / each;
  }
};

// Counts this thread's part of an array of `count` flags.
template <class Gpu>
RLK_DEVICE CountedTokens counted_tokens(const std::uint8_t* flags, int count) {
  CountedTokens found;
  const int thread = Gpu::thread();
  const VectorRun run(flags, count, 1);
  const auto* const whole = reinterpret_cast<const float*>(flags + run.head);
  RLK_UNROLL_NOT
  for (int i = thread; i < run.vectors; i += kTokenThreads) {
    found.take(Gpu::load_vec4(whole + kVec4 * i), run.head + 16 * i);
  }
  if (thread < run.head) found.take(flags[thread], thread);
  const int tail = run.head + 16 * run.vectors + thread;
  if (tail < count) found.take(flags[tail], tail);
  return found;
}

template <class Gpu>
RLK_DEVICE void fill_with_zeros(float* to, int count) {
  const int thread = Gpu::thread();
  const VectorRun run(to, count, 4);
  RLK_UNROLL_NOT
  for (int i = thread; i < run.vectors; i += kTokenThreads) Gpu::store_vec4(to + run.head + kVec4 * i, Vec4{});
  if (thread < run.head) to[thread] = 0.0f;
  const int tail = run.head + kVec4 * run.vectors + thread;
  if (tail < count) to[tail] = 0.0f;
}
// flags: null if no token is masked.
template <class Gpu>
RLK_DEVICE void fill_where(const std::uint8_t* flags, float value, float* to, int count) {
  if (value == 0.0f) return fill_with_zeros<Gpu>(to, count);
  RLK_UNROLL_NOT
  for (int i = Gpu::thread(); i < count; i += kTokenThreads) {
    to[i] = flags == nullptr || flags[i] != 0 ? value : 0.0f;
  }
}

struct BlanksShared {
  CountedTokens of_waves[kMostTokenWaves];
};
// Replaces the pass reward_tokens if the function are_blank() returns true for the call. The block processes the tile
// of slot `block`.
template <class Gpu>
RLK_DEVICE void blank_tokens(const ScatterRewardsParams& p, TilePartial<8>* all_partials, int tile, std::int64_t block,
                             BlanksShared* shared) {
  const Sequences& q = p.sequences;
  TilePartial<8>& partial = in_global(all_partials)[block];
  const std::int64_t s = find_sequence<Gpu>(q, block, tile);
  const TokenSpan span = slotted_span(q, s);
  const std::int64_t first = (block - first_slot(q, s, tile)) << tile, left = span.length - first;
  if (q.packed() && is_rest(q, s)) {
    const int rest = left <= 0 ? 0 : left < 1 << tile ? static_cast<int>(left) : 1 << tile;
    return clear_tokens<Gpu, RewardTokenTerms>(p, span.begin + first, rest, Gpu::thread(), kTokenThreads);
  }
  if (left <= 0) {  // this workspace slot has no tile
    if (Gpu::thread() == 0) partial = TilePartial<8>{};
    return;
  }
  const int count = left < std::int64_t{1} << tile ? static_cast<int>(left) : 1 << tile;
  const std::int64_t at = (q.packed() ? span.begin : s * q.num_tokens) + first;
  const std::int64_t mask_at = (q.packed() ? span.begin : s * p.mask.row_stride) + first;
  const std::uint8_t* flags = nullptr;
  if (p.mask.data != nullptr) flags = in_global(static_cast<const std::uint8_t*>(p.mask.data)) + mask_at;
  CountedTokens found;
  if (flags != nullptr) {
    found = counted_tokens<Gpu>(flags, count);
  } else if (Gpu::thread() == 0) {
    found.count = found.after = static_cast<std::uint32_t>(count);
  }
  const RewardTokenTerms::Factors f = RewardTokenTerms::factors(p, s);
  const float reward = canonical(f.added);
  fill_where<Gpu>(flags, reward, in_global(p.to_tokens) + at, count);
  if (p.combined != nullptr) {
    fill_where<Gpu>(flags, combined_reward(p.spec, reward, 0.0f, f.lagrange), in_global(p.combined) + at, count);
  }
  if (p.costs != nullptr) fill_with_zeros<Gpu>(in_global(p.costs) + at, count);

  found.count = Gpu::sum_over_wave(found.count);
  found.after = Gpu::max_over_wave(found.after);
  if (Gpu::thread() % Gpu::kLanes == 0) shared->of_waves[Gpu::thread() / Gpu::kLanes] = found;
  Gpu::barrier();
  if (Gpu::thread() != 0) return;
  RLK_UNROLL
  for (int wave = 1; wave < kTokenWaves<Gpu>; ++wave) {
    const CountedTokens other = shared->of_waves[wave];
    found.count += other.count;
    found.after = found.after > other.after ? found.after : other.after;
  }
  const int from_window = static_cast<int>(first & ((1 << kWindow) - 1));
  partial.count[0] = found.count;
  partial.maximum[0] = found.count == 0 ? 0.0f : static_cast<float>(from_window + static_cast<int>(found.after));
}

}  // namespace rlk
