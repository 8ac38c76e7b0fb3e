// The step of scatter_rewards that adds rewards of spans and sequences to tokens, after the pass over tokens. On a GPU
// one wave processes a sequence. On the CPU a wave is one lane. Spans that may share a token are added one after
// another. The same lane always processes a given token, so a token's additions happen in the order of the spans.
//
// Gpu has wave_barrier() and the members that kernels/tokens/lane_passes.h lists. After wave_barrier(), a lane's
// earlier writes are visible to the other lanes of its wave.
#pragma once

#include "kernels/advantages/reward_terms.h"
#include "kernels/tokens/lane_passes.h"
#include "kernels/tokens/workspace.h"

namespace rlk {

// kSpreads: the call spreads rewards over spans.
template <class Gpu, bool kSpreads>
class RewardSequence {
 public:
  RLK_DEVICE RewardSequence(const ScatterRewardsParams& p, std::int64_t s)
      : p_(p),
        s_(s),
        span_(span_of(p.sequences, s)),
        flags_(p.mask),
        mask_at_(p.sequences.packed() ? span_.begin : s * p.mask.row_stride),
        to_(p.sequences.packed() ? span_.begin : s * p.sequences.num_tokens),
        lane_(Gpu::thread() % Gpu::kLanes) {}

  RLK_DEVICE void run(const TilePartial<8>* partials, int tile) {
    if (has_bad_offsets(p_.sequences, s_)) {
      if (lane_ == 0) in_global(p_.lengths)[s_] = 0;
      return;
    }
    find_last(in_global(partials) + first_slot(p_.sequences, s_, tile), tile);
    if (lane_ == 0) in_global(p_.lengths)[s_] = length_;
    if (length_ == 0) return;
    if (p_.combined != nullptr) lagrange_ = lagrange_of(p_);
    float reward = sequence_reward(p_.spec, given_reward(p_, s_), length_);
    if (!add_spans()) reward = canonical_nan();
    const float cost = p_.cost.data == nullptr ? 0.0f : in_global(p_.cost.data)[s_ * p_.cost.sequence_stride];
    if (is_mine(last_)) add(last_, reward, finished_reward(cost));
  }

 private:
  // kAhead is the number of positions that a lane loads before it uses any of them.
  static constexpr int kLanes = Gpu::kLanes, kAhead = kSpreads ? 8 : 4;
  static constexpr std::int64_t kChunk = std::int64_t{kLanes} * kAhead;

  RLK_DEVICE bool is_mine(std::int64_t position) const { return position % kLanes == lane_; }

  RLK_DEVICE void find_last(const TilePartial<8>* partials, int tile) {
    const std::int64_t tiles = tiles_of(span_.length, tile);
    std::int64_t length = 0, last = -1;
    for (std::int64_t i = lane_; i < tiles; i += kLanes) {
      const std::uint32_t count = partials[i].count[0];
      length += count;
      if (count == 0) continue;
      const std::int64_t window = (i << tile) >> kWindow << kWindow;
      last = window + static_cast<std::int64_t>(partials[i].maximum[0]) - 1;
    }
    length_ = sum_over_wave(length);
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const std::int64_t other = shuffle_xor<Gpu>(last, distance);
      last = last > other ? last : other;
    }
    last_ = last;
    // If offsets do not ascend, it can happen that no block has processed some of this sequence's tiles. The counts of
    // these tiles are then garbage.
    const bool sound = last_ >= 0 && last_ < span_.length && length_ > 0 && length_ <= span_.length;
    if (!sound) length_ = 0;
  }
  static RLK_DEVICE std::int64_t sum_over_wave(std::int64_t x) {
    for (int distance = 1; distance < kLanes; distance *= 2) x += shuffle_xor<Gpu>(x, distance);
    return x;
  }

  // Returns which of this lane's tokens in a chunk are unmasked and lie within [begin, end). Bit k stands for position
  // chunk * kChunk + k * kLanes + lane.
  RLK_DEVICE std::uint32_t counted_of(std::int64_t chunk, std::int64_t begin, std::int64_t end) const {
    std::uint32_t found = 0;
    with_flag_bytes(flags_, [&](auto bytes) {
      const FlagsFrom<decltype(bytes)::value, GlobalMemory> flags(flags_, mask_at_);
      typename decltype(flags)::Flag flag[kAhead];
      RLK_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const std::int64_t at = chunk * kChunk + k * kLanes + lane_;
        flag[k] = 0;
        if (at >= begin && at < end) flag[k] = flags.load(at);
      }
      RLK_UNROLL
      for (int k = 0; k < kAhead; ++k) found |= (flags.counts(flag[k]) ? 1u : 0u) << k;
    });
    return found;
  }
  // Finds the last (or first) token of the chunk that any lane found. Returns its bit in the lane that has the token,
  // and 0 in every other lane.
  RLK_DEVICE std::uint32_t nearest(std::uint32_t found, bool last, bool* any) const {
    std::uint32_t most = 0;  // distance of the token from the chunk's other end, plus one; 0: no lane found a token
    RLK_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      const auto at = static_cast<std::uint32_t>(k * kLanes + lane_);
      const std::uint32_t far = last ? at + 1 : static_cast<std::uint32_t>(kChunk) - at;
      if ((found >> k & 1u) != 0) most = most > far ? most : far;
    }
    most = Gpu::max_over_wave(most);
    *any = most != 0;
    const std::uint32_t at = last ? most - 1 : static_cast<std::uint32_t>(kChunk) - most;
    return most != 0 && at % kLanes == static_cast<std::uint32_t>(lane_) ? 1u << at / kLanes : 0u;
  }

  RLK_DEVICE float value_at(std::int64_t position) const { return in_global(p_.to_tokens)[to_ + position]; }
  RLK_DEVICE void add(std::int64_t position, float reward, float cost) const {
    add_to(value_at(position), position, reward, cost);
  }
  RLK_DEVICE void add_to(float before, std::int64_t position, float reward, float cost) const {
    const ScatterRewardsParams& p = Gpu::first_argument(p_);
    const float x = finished_reward(add_rn(before, reward));
    in_global(p.to_tokens)[to_ + position] = x;
    if (p.costs != nullptr) in_global(p.costs)[to_ + position] = cost;
    if (p.combined != nullptr) {
      in_global(p.combined)[to_ + position] = combined_reward(p.spec, x, cost, lagrange_);
    }
  }

  // Adds the rewards of all spans. Returns whether every span was valid.
  RLK_DEVICE bool add_spans() const {
    if (p_.span_offsets.data == nullptr) return true;
    const Span spans = span_of<GlobalMemory>(p_.span_offsets, p_.num_spans, s_);
    const bool ends = s_ + 1 < p_.sequences.num_sequences || spans.begin + spans.length == p_.num_spans;
    if (!spans.good || !ends) return false;
    const std::int64_t stop = spans.begin + spans.length;
    RLK_UNROLL_NOT
    for (std::int64_t first = spans.begin; first < stop; first += kLanes) {
      const std::int64_t after = first + kLanes < stop ? first + kLanes : stop;
      bool done = false;
      if constexpr (!kSpreads) done = add_turns(first, after);
      RLK_UNROLL_NOT
      for (std::int64_t i = done ? after : first; i < after; ++i) {
        const std::int64_t begin = offset_at<GlobalMemory>(p_.spans, 2 * i);
        const std::int64_t end = offset_at<GlobalMemory>(p_.spans, 2 * i + 1);
        if (begin < 0 || begin > end || end > span_.length) return false;
        add_span(begin, end, in_global(p_.span_rewards)[i]);
      }
      // In the next round, another lane may add to the same token, and must see this round's sum.
      Gpu::wave_barrier();
    }
    return true;
  }
  // Adds the spans [first, after) at once, one lane per span. Adding at once requires that no spans overlap, as with
  // the turns of a dialogue. Adding at once also requires that the token to which a span's reward goes (the last or the
  // first one) is unmasked. Each span then changes a different token. If any span does not meet these conditions, the
  // function adds none of the spans and returns false.
  RLK_DEVICE bool add_turns(std::int64_t first, std::int64_t after) const {
    const std::int64_t i = first + lane_;
    std::int64_t begin = 0, end = 0;
    bool is_turn = true;
    if (i < after) {
      begin = offset_at<GlobalMemory>(p_.spans, 2 * i);
      end = offset_at<GlobalMemory>(p_.spans, 2 * i + 1);
      const std::int64_t before = i > first ? offset_at<GlobalMemory>(p_.spans, 2 * i - 1) : 0;
      is_turn = before <= begin && begin <= end && end <= span_.length;
    }
    const std::int64_t at = p_.spec.place == SpanPlace::kLast ? end - 1 : begin;
    if (is_turn && begin < end) is_turn = counts<GlobalMemory>(flags_, mask_at_ + at);
    if (Gpu::max_over_wave(is_turn ? 0 : 1) != 0) return false;
    if (begin < end) add(at, in_global(p_.span_rewards)[i], 0.0f);
    return true;
  }
  // Spreading a reward takes two rounds. The first round counts the span's tokens. The second round adds to each token
  // its share.
  RLK_DEVICE void add_span(std::int64_t begin, std::int64_t end, float reward) const {
    if (begin >= end) return;
    const bool last = p_.spec.place == SpanPlace::kLast;
    const std::int64_t low = begin / kChunk, chunks = (end - 1) / kChunk - low + 1;
    std::int64_t count = 0;
    RLK_UNROLL_NOT
    for (int round = kSpreads ? 0 : 1; round < 2; ++round) {
      RLK_UNROLL_NOT
      for (std::int64_t i = 0; i < chunks; ++i) {
        const std::int64_t chunk = low + (last ? chunks - 1 - i : i);
        std::uint32_t found = counted_of(chunk, begin, end);
        if (round == 0) {
          RLK_UNROLL
          for (int k = 0; k < kAhead; ++k) count += found >> k & 1u;
          continue;
        }
        bool done = false;
        if constexpr (!kSpreads) found = nearest(found, last, &done);
        const std::int64_t first = chunk * kChunk + lane_;
        float before[kAhead];
        RLK_UNROLL
        for (int k = 0; k < kAhead; ++k) before[k] = (found >> k & 1u) != 0 ? value_at(first + k * kLanes) : 0.0f;
        RLK_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          if ((found >> k & 1u) != 0) add_to(before[k], first + k * kLanes, reward, 0.0f);
        }
        if (done) return;
      }
      if (round == 0) reward = div_rn(reward, static_cast<float>(sum_over_wave(count)));
    }
  }

  const ScatterRewardsParams& p_;
  std::int64_t s_;
  TokenSpan span_;
  TokenMask flags_;
  std::int64_t mask_at_, to_, length_ = 0, last_ = -1;
  int lane_;
  float lagrange_ = 0.0f;
};

// Number of blocks of the pass over sequences. Each wave of this pass processes one sequence. It reads the results that
// the pass over tokens stored for each of the sequence's tiles.
template <class Gpu>
std::int64_t reward_blocks(const Sequences& q) {
  return (q.num_sequences + kTokenWaves<Gpu> - 1) / kTokenWaves<Gpu>;
}
inline std::int64_t reward_workspace_bytes(const Sequences& q, int tile) {
  return slots_of(q, tile) * static_cast<std::int64_t>(sizeof(TilePartial<8>));
}
template <class Gpu>
RLK_DEVICE void reward_tokens(const ScatterRewardsParams& p, TilePartial<8>* partials, std::int64_t slots, int tile,
                              std::int64_t block, WaveResults* shared) {
  token_tiles<Gpu, RewardTokenTerms>(p, partials, slots, tile, block, shared,
                                     [&](std::int64_t s) { return RewardTokenTerms::factors(p, s); });
}
template <class Gpu, bool kSpreads>
RLK_DEVICE void reward_sequences(const ScatterRewardsParams& p, const TilePartial<8>* partials, int tile,
                                 std::int64_t block) {
  const std::int64_t s = block * kTokenWaves<Gpu> + Gpu::thread() / Gpu::kLanes;
  if (s < p.sequences.num_sequences) RewardSequence<Gpu, kSpreads>(p, s).run(partials, tile);
}
inline bool spreads(const ScatterRewardsParams& p) { return p.num_spans > 0 && p.spec.place == SpanPlace::kSpread; }

}  // namespace rlk
