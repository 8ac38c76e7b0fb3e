// scatter_rewards on a GPU for rewards that are spread over the tokens of spans. One block or a few blocks process a
// sequence. A block keeps the sequence's mask as bits in shared memory, with the number of set bits before each word.
// Two look-ups therefore give the number of a span's tokens. The block then writes each token once, a vector at a time.
// HBM bandwidth bounds this pass. If tokens have no rewards of their own, this pass is the only one: it reads the mask
// and writes the outputs. If tokens have rewards, the pass over tokens runs first, and this pass updates only vectors
// that hold tokens of a span or the sequence's reward.
#pragma once

#include <limits>

#include "kernels/tokens/mask_counts.h"

namespace rlk {

constexpr int kSpreadSpans =
    // most spans that a block holds; one more entry marks the list's end
    kTokenThreads - 1;
constexpr int kMostSpreadParts = 32;

// Whether this pass can compute a call, given the tile of a block. Positions and numbers of spans must fit an int.
template <class Gpu>
bool spreads_by_blocks(const ScatterRewardsParams& p, int tile) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  return spreads(p) && tile != kWaveTile<Gpu> && p.sequences.num_tokens <= kMost && p.num_spans <= kMost;
}
// Blocks per sequence; each block reads the whole mask.
inline int spread_parts(const Sequences& q, int tile) {
  const std::int64_t tiles = mean_length(q) >> tile;
  return static_cast<int>(tiles < 1 ? 1 : tiles < kMostSpreadParts ? tiles : kMostSpreadParts);
}

struct alignas(16) SpreadSpan {
  std::int32_t begin, end;
  float reward, combined;  // outputs of each token of the span, if tokens have no rewards of their own
};
struct SpreadShared {
  MaskShared mask;
  SpreadSpan spans[kTokenThreads];
  float shares[kTokenThreads];  // the reward of a span; after its tokens are counted, the reward per token
  std::uint32_t counts[kTokenThreads];
  // One element per wave. `left` is the number of spans from the first invalid span on. `are_apart` is 0 if no spans
  // overlap.
  std::uint32_t left[kMostTokenWaves], are_apart[kMostTokenWaves];
  float reward, cost, lagrange;  // the sequence's own reward, cost and Lagrange weight
  float blank, blank_combined;   // initial value of the sequence's tokens: NaN if the sequence's offsets are bad
};

template <class Gpu>
class RewardSpread {
 public:
  // The work of block `part`, one of the `parts` blocks of sequence s. are_written: an earlier pass wrote the tokens'
  // own values.
  RLK_DEVICE RewardSpread(const ScatterRewardsParams& p, std::int64_t s, int part, int parts, bool are_written,
                          SpreadShared* shared)
      : p_(p),
        shared_(shared),
        s_(static_cast<int>(of_lane(s))),
        part_(part),
        parts_(parts),
        written_(are_written ? Written::kBefore : Written::kNot),
        length_(static_cast<int>(span_of(p.sequences, s).length)),
        mask_(of_lane(p.sequences.packed() ? span_of(p.sequences, s).begin : s * p.mask.row_stride), length_,
              &shared->mask) {
    const TokenSpan span = span_of(p.sequences, s);
    to_ = of_lane(p.sequences.packed() ? span.begin : s * p.sequences.num_tokens);
  }

  RLK_DEVICE void run() {
    const int stretches = length_ <= kStretch ? 1 : (length_ + kStretch - 1) / kStretch;
    int first = 0;
    do {
      RLK_UNROLL_NOT
      for (int round = 0; round < 2 * stretches; ++round) {
        const bool is_count = round < stretches;
        load_stretch(is_count ? round : round - stretches);
        if (round == 0) begin_spans(first);
        if (is_count) count_tokens();
        if (round == stretches - 1) place_spans();
        if (!is_count) write(first + count_ == num_spans_);
      }
      first += count_;
      written_ = Written::kHere;
    } while (first < num_spans_);
  }

 private:
  // Whether tokens already hold their own values, from the earlier pass or from this pass.
  enum class Written : int { kNot, kBefore, kHere };
  static constexpr int kRewardThread = kTokenThreads / 2;  // thread that handles the sequence's own values
  static constexpr int kNowhere = -kVec4, kBehind = std::numeric_limits<std::int32_t>::max();

  RLK_DEVICE const ScatterRewardsParams& p() const { return Gpu::first_argument(p_); }
  // Returns x in a vector register. Wave-uniform values would otherwise stay in SGPRs over a loop, and there are not
  // enough SGPRs.
  static RLK_DEVICE std::int64_t of_lane(std::int64_t x) {
    return static_cast<std::int64_t>(Gpu::of_lane(static_cast<std::uintptr_t>(x)));
  }
  static RLK_DEVICE int thread() { return static_cast<int>(of_lane(Gpu::thread())); }

  RLK_DEVICE void load_stretch(int stretch) {
    if (stretch == stretch_) return;
    const bool is_first = stretch_ < 0;
    if (!is_first) Gpu::barrier();  // other threads may still read the previous stretch of the mask
    stretch_ = stretch;
    mask_.load(p().mask, stretch, [&] {
      if (is_first) check_spans();
    });
    if (is_first) take_check();
  }

  // ---- spans ----------------------------------------------------------------------------------------------------------

  // Index of this thread's span among the loaded spans. The last threads take the first spans, because the first
  // threads still wait for the mask.
  RLK_DEVICE int own_span() const { return kTokenThreads - 1 - thread(); }
  RLK_DEVICE std::int64_t bound_of(int i, int which) const {
    return offset_at<GlobalMemory>(p().spans, 2 * (std::int64_t{first_span_} + i) + which);
  }
  // Counts the spans from the first invalid span on, and finds out whether a span begins before the previous span ends.
  // Never reads the spans of a sequence with bad offsets.
  RLK_DEVICE void check_spans() {
    const ScatterRewardsParams& p = this->p();
    const bool has_good_cuts = !has_bad_offsets(p.sequences, s_);
    bool are_good = true;
    if (has_good_cuts) {
      const Span spans = span_of<GlobalMemory>(p.span_offsets, p.num_spans, s_);
      const bool ends = s_ + 1 < p.sequences.num_sequences || spans.begin + spans.length == p.num_spans;
      are_good = spans.good && ends;
      first_span_ = static_cast<int>(spans.begin);
      num_spans_ = are_good ? static_cast<int>(spans.length) : 0;
    }
    if (thread() == kRewardThread) {
      shared_->reward = are_good ? given_reward(p, s_) : canonical_nan();
      shared_->cost = p.cost.data == nullptr ? 0.0f : in_global(p.cost.data)[s_ * p.cost.sequence_stride];
      // The function of_lane() makes a copy of the value. Without the copy, the compiler would select between two
      // addresses: that of a kernel argument, and one in global memory.
      float lagrange = float_of(static_cast<std::int32_t>(of_lane(bits_of(p.lagrange_value))));
      if (p.lagrange != nullptr) lagrange = checked_lagrange(*in_global(p.lagrange));
      const float blank = has_good_cuts ? 0.0f : canonical_nan();
      shared_->lagrange = lagrange;
      shared_->blank = blank;
      shared_->blank_combined = p.combined == nullptr ? 0.0f : combined_reward(p.spec, blank, 0.0f, lagrange);
    }
    if (own_span() < num_spans_) shared_->shares[own_span()] = in_global(p.span_rewards)[first_span_ + own_span()];
    std::uint32_t left = 0, are_apart = 0;
    RLK_UNROLL_NOT
    for (int i = own_span(); i < num_spans_; i += kTokenThreads) {
      const std::int64_t begin = bound_of(i, 0), end = bound_of(i, 1), before = i > 0 ? bound_of(i - 1, 1) : 0;
      const bool is_span = begin >= 0 && begin <= end && end <= length_;
      if (!is_span && left == 0) left = static_cast<std::uint32_t>(num_spans_ - i);
      if (before > begin) are_apart = 1;
    }
    left = Gpu::max_over_wave(left);
    are_apart = Gpu::max_over_wave(are_apart);
    if (thread() % Gpu::kLanes != 0) return;
    shared_->left[thread() / Gpu::kLanes] = left;
    shared_->are_apart[thread() / Gpu::kLanes] = are_apart;
  }
  RLK_DEVICE void take_check() {
    const int lane = thread() % Gpu::kLanes;
    const std::uint32_t left = Gpu::max_over_wave(lane < kTokenWaves<Gpu> ? shared_->left[lane] : 0);
    are_turns_ = Gpu::max_over_wave(lane < kTokenWaves<Gpu> ? shared_->are_apart[lane] : 0) == 0;
    if (left > 0 && thread() == kRewardThread) shared_->reward = canonical_nan();
    num_spans_ -= static_cast<int>(left);
  }
  // Loads at most kSpreadSpans spans, from index `first` on.
  RLK_DEVICE void begin_spans(int first) {
    const int rest = num_spans_ - first, i = own_span();
    count_ = rest < kSpreadSpans ? rest : kSpreadSpans;
    const bool is_again = written_ == Written::kHere;
    if (is_again) Gpu::barrier();  // other threads may still read the previous spans
    SpreadSpan span = {kBehind, kBehind, 0.0f, 0.0f};
    if (i < count_) {
      span.begin = static_cast<int>(bound_of(first + i, 0));
      span.end = static_cast<int>(bound_of(first + i, 1));
      if (is_again) shared_->shares[i] = in_global(p().span_rewards)[first_span_ + first + i];
    }
    shared_->spans[i] = span;
    shared_->counts[i] = 0;
    num_tokens_ = 0;
    last_ = kNowhere;
  }
  RLK_DEVICE void count_tokens() {
    const int counted = mask_.counted();
    num_tokens_ += counted;
    if (counted > 0) last_ = mask_.last_counted();
    const int i = own_span();
    if (i >= count_) return;
    const SpreadSpan span = shared_->spans[i];
    shared_->counts[i] += mask_.counted_before(span.end) - mask_.counted_before(span.begin);
  }
  RLK_DEVICE void place_spans() {
    const ScatterRewardsParams& p = this->p();
    const int i = own_span();
    const bool has_good_cuts = !is_nan(shared_->blank);
    if (!has_good_cuts) last_ = kNowhere;
    if (thread() == 0 && part_ == 0) in_global(p.lengths)[s_] = has_good_cuts ? num_tokens_ : 0;
    if (i < count_) {
      const float share = div_rn(shared_->shares[i], static_cast<float>(shared_->counts[i]));
      const float reward = finished_reward(add_rn(shared_->blank, share));
      shared_->shares[i] = share;
      shared_->spans[i].reward = reward;
      if (p.combined != nullptr) {
        shared_->spans[i].combined = combined_reward(p.spec, reward, 0.0f, shared_->lagrange);
      }
    }
    Gpu::barrier();
  }
  // Index of the first turn (a span that overlaps no other) that ends after the position. If there is none, the index
  // of the list's end.
  RLK_DEVICE int turn_of(int position) const {
    int i = 0;
    RLK_UNROLL_NOT
    for (int step = count_ == 0 ? 0 : 1 << highest_bit(static_cast<std::uint32_t>(count_)); step > 0; step /= 2) {
      if (shared_->spans[i + step - 1].end <= position) i += step;
    }
    return i;
  }

  // ---- tokens ---------------------------------------------------------------------------------------------------------

  // Writes the outputs of the loaded stretch. The thread that reads a vector also writes it, and a wave processes
  // neighbouring vectors. is_last: no further spans follow.
  RLK_DEVICE void write(bool is_last) const {
    const ScatterRewardsParams& p = this->p();
    float* const to = in_global(p.to_tokens) + to_ + mask_.begin;
    const int shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(to) / sizeof(float) % kVec4);
    const int vec4s = (mask_.tokens + shift + kVec4 - 1) / kVec4, waves = parts_ * kTokenWaves<Gpu>;
    const int each = ((vec4s + waves - 1) / waves + Gpu::kLanes - 1) / Gpu::kLanes * Gpu::kLanes;
    const int first = (part_ * kTokenWaves<Gpu> + thread() / Gpu::kLanes) * each, lane = thread() % Gpu::kLanes;
    const int after = first + each < vec4s ? first + each : vec4s;
    const auto as_one = [&](const float* other) {
      return other == nullptr || is_aligned(other + to_ + mask_.begin - shift, sizeof(Vec4));
    };
    const bool plain = written_ == Written::kNot && are_turns_ && as_one(p.costs) && as_one(p.combined);
    Run run = {first + lane < after && are_turns_ ? turn_of(mask_.begin + kVec4 * (first + lane) - shift) : 0, 0, 0.0f,
               0.0f};
    RLK_UNROLL_NOT
    for (int i = first + lane; i < after; i += Gpu::kLanes) {
      const int at = kVec4 * i - shift, position = mask_.begin + at;
      if (!plain || position + kVec4 > run.end) {
        if (are_turns_) find_run(position, is_last, &run);
        if (!plain || at < 0 || position + kVec4 > run.end) {
          write_vec4(at, is_last, run.span);
          continue;
        }
      }
      write_plain(at, run);
    }
  }
  // A run of positions that ends at `end`. All unmasked tokens of a run get the same value. The positions are either
  // those of the turn `span` (a span that overlaps no other), or those between the previous turn and this turn.
  struct Run {
    int span, end;
    float reward, combined;
  };
  RLK_DEVICE void find_run(int position, bool is_last, Run* run) const {
    while (shared_->spans[run->span].end <= position) ++run->span;
    const SpreadSpan span = shared_->spans[run->span];
    const bool is_inside = span.begin <= position;
    run->end = is_inside ? span.end : span.begin;
    run->reward = is_inside ? span.reward : shared_->blank;
    run->combined = is_inside ? span.combined : shared_->blank_combined;
    const int after = mask_.begin + mask_.tokens;
    if (run->end > after) run->end = after;
    if (is_last && last_ >= position && last_ < run->end) run->end = last_;
  }
  RLK_DEVICE void write_plain(int at, const Run& run) const {
    const ScatterRewardsParams& p = this->p();
    const std::uint32_t counted = mask_.bits_from(at);
    const auto of_counted = [&](float x) {
      return vec4_of<Vec4>([&](int k) { return (counted >> k & 1u) != 0 ? x : 0.0f; });
    };
    const std::int64_t to = to_ + mask_.begin + at;
    Gpu::store_vec4(in_global(p.to_tokens) + to, of_counted(run.reward));
    if (p.costs != nullptr) Gpu::store_vec4(in_global(p.costs) + to, Vec4{});
    if (p.combined != nullptr) Gpu::store_vec4(in_global(p.combined) + to, of_counted(run.combined));
  }
  // Writes four positions, which may belong to different spans. i is the first turn that ends after the first position;
  // if spans overlap, i is the first span.
  RLK_DEVICE void write_vec4(int at, bool is_last, int i) const {
    const ScatterRewardsParams& p = this->p();
    const std::uint32_t counted = mask_.counted_of(at);
    const int position = mask_.begin + at;
    const bool has_last = is_last && last_ >= position && last_ < position + kVec4;
    const bool has_span = counted != 0 && (!are_turns_ || shared_->spans[i].begin < position + kVec4);
    if (written_ != Written::kNot && !has_last && !has_span) return;
    const std::int64_t to = to_ + mask_.begin + at;
    Vec4 x = broadcast<Vec4>(shared_->blank), cost = {};
    if (written_ != Written::kNot) x = load_tokens(in_global(p.to_tokens) + to, at);
    RLK_UNROLL_NOT
    for (; i < count_; ++i) {
      const SpreadSpan span = shared_->spans[i];
      const float share = shared_->shares[i];
      if (are_turns_ && span.begin >= position + kVec4) break;
      RLK_UNROLL
      for (int k = 0; k < kVec4; ++k) {
        const float sum = finished_reward(add_rn(x.v[k], share));
        if (span.begin <= position + k && position + k < span.end) x.v[k] = sum;
      }
      if (are_turns_ && span.end >= position + kVec4) break;
    }
    if (has_last) {
      const float reward = sequence_reward(p.spec, shared_->reward, num_tokens_);
      RLK_UNROLL
      for (int k = 0; k < kVec4; ++k) {
        if (position + k != last_) continue;
        x.v[k] = finished_reward(add_rn(x.v[k], reward));
        cost.v[k] = finished_reward(shared_->cost);
      }
    }
    const auto mask = vec4_of<Vec4Mask>([&](int k) { return -static_cast<std::int32_t>(counted >> k & 1u); });
    x = where(mask, x);
    store_tokens(in_global(p.to_tokens) + to, at, x);
    if (p.costs != nullptr) store_tokens(in_global(p.costs) + to, at, cost);
    if (p.combined == nullptr) return;
    x = where(mask, combined_reward(p.spec, x, cost, shared_->lagrange));
    store_tokens(in_global(p.combined) + to, at, x);
  }
  // Whether the four positions from `at` on (`at` >= -3) can be written as one vector: all must lie in the stretch.
  RLK_DEVICE bool are_whole(const float* tokens, int at) const {
    return at >= 0 && at + kVec4 <= mask_.tokens && is_aligned(tokens, sizeof(Vec4));
  }
  RLK_DEVICE Vec4 load_tokens(const float* from, int at) const {
    if (are_whole(from, at)) return Gpu::load_vec4(from);
    Vec4 x = {};
    RLK_UNROLL
    for (int k = 0; k < kVec4; ++k) {
      if (at + k >= 0 && at + k < mask_.tokens) x.v[k] = from[k];
    }
    return x;
  }
  RLK_DEVICE void store_tokens(float* to, int at, const Vec4& x) const {
    if (are_whole(to, at)) return Gpu::store_vec4(to, x);
    RLK_UNROLL
    for (int k = 0; k < kVec4; ++k) {
      if (at + k >= 0 && at + k < mask_.tokens) to[k] = x.v[k];
    }
  }

  const ScatterRewardsParams& p_;
  SpreadShared* shared_;
  int s_;
  std::int64_t to_;
  int part_, parts_;
  Written written_;
  int length_;
  MaskStretch<Gpu> mask_;
  int stretch_ = -1;  // the stretch of the mask that is loaded
  // first_span_: index of the sequence's first span. num_spans_: number of its spans before the first invalid span.
  // count_: number of loaded spans.
  int first_span_ = 0, num_spans_ = 0, count_ = 0;
  bool are_turns_ = true;
  int num_tokens_ = 0, last_ = kNowhere;  // number of unmasked tokens of the sequence; position of the last of them
};

// The grid ends with blocks that clear packed tokens outside every sequence. `rest` is this block's index among these
// blocks.
template <class Gpu>
RLK_DEVICE void clear_spread_rest(const ScatterRewardsParams& p, std::int64_t rest) {
  // Each array has its own call here. In a loop over the arrays, HIP's compiler would no longer know that they are not
  // in shared memory.
  const std::int64_t parts = rest_blocks(p.sequences);
  clear_rest(p.sequences, p.to_tokens, rest, parts, Gpu::thread(), kTokenThreads);
  clear_rest(p.sequences, p.costs, rest, parts, Gpu::thread(), kTokenThreads);
  clear_rest(p.sequences, p.combined, rest, parts, Gpu::thread(), kTokenThreads);
}

// The work of block `block`. A sequence has spread_parts blocks. are_written: reward_tokens ran before this pass.
template <class Gpu>
RLK_DEVICE void spread_rewards(const ScatterRewardsParams& p, std::int64_t block, int parts, bool are_written,
                               SpreadShared* shared) {
  const auto index = static_cast<std::uint32_t>(block), each = static_cast<std::uint32_t>(parts);
  RewardSpread<Gpu>(p, index / each, static_cast<int>(index % each), parts, are_written, shared).run();
}

}  // namespace rlk
