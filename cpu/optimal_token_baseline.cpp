// CPU backend of the operator `optimal_token_baseline`. A first pass spreads sequences over threads, and a second pass
// spreads groups.
#include "rlk/ops/optimal_token_baseline.h"

#include <algorithm>
#include <vector>

#include "float_environment.h"
#include "kernels/advantages/optimal_baseline_token.h"
#include "optimal_token_baseline_simd.h"
#include "rlk/backends.h"
#include "thread_pool.h"
#include "tokens/passes.h"

namespace rlk::cpu {
namespace {

const OptimalTokenBaselineLanes& lanes() { return RLK_CPU_LANES_IN_USE(optimal_token_baseline_simd); }

constexpr std::int64_t kChunk = kBaselineChunk;

class Baseline {
 public:
  explicit Baseline(const OptimalTokenBaselineParams& p)
      : p_(p),
        q_(p.sequences),
        weights_(static_cast<std::size_t>(q_.num_slots())),
        counts_(static_cast<std::size_t>(q_.num_sequences)) {}

  void run() {
    parallel_for(q_.num_sequences, 1, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      for (std::int64_t s = begin; s < end; ++s) scan(s);
    });
    parallel_for(p_.num_groups, 1, [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      for (std::int64_t g = begin; g < end; ++g) subtract(g);
    });
  }

 private:
  std::int64_t slot(std::int64_t s, const TokenSpan& span) const {
    return q_.packed() ? span.begin : s * q_.num_tokens;
  }
  const float* at(const PolicyTokens& a, std::int64_t s, const TokenSpan& span, std::int64_t t) const {
    return a.data + offset_of(a, q_, s, span) + t * a.token_stride;
  }

  void scan(std::int64_t s) {
    const TokenSpan span = span_of(q_, s);
    float* const w = weights_.data() + slot(s, span);
    float* const returns = p_.returns + slot(s, span);
    const std::int64_t chunks = (span.length + kChunk - 1) / kChunk;
    const bool shares_reward = p_.rewards.token_stride == 0;
    const std::int64_t mask_at = q_.packed() ? span.begin : s * p_.mask.row_stride;
    std::int64_t tokens = 0;
    alignas(64) std::int32_t counted[kChunk];
    float before = 0.0f, x[kChunk];
    for (std::int64_t first = 0; first < span.length; first += kChunk) {
      const int count = static_cast<int>(std::min(kChunk, span.length - first));
      const float* const importance = p_.importance.data == nullptr ? nullptr : at(p_.importance, s, span, first);
      lanes().mask(p_.mask, mask_at + first, count, counted);
      lanes().weights(at(p_.logprob, s, span, first), at(p_.sum_p_sq, s, span, first), importance,
                      p_.importance.token_stride, counted, count, x);
      std::fill(x + count, x + kChunk, 0.0f);
      lanes().up_to(x);
      for (int i = 0; i < count; ++i) tokens -= counted[i];
      lanes().add_before(before, x, counted, count, w + first);
      before = add_rn(before, x[kChunk - 1]);
    }
    counts_[static_cast<std::size_t>(s)] = tokens;
    float after = 0.0f;
    for (std::int64_t k = chunks - 1; k >= 0; --k) {
      const std::int64_t first = k * kChunk;
      const int count = static_cast<int>(std::min(kChunk, span.length - first));
      if (shares_reward) {
        lanes().add_after(0.0f, at(p_.rewards, s, span, 0), 0, w + first, count, returns + first);
        continue;
      }
      lanes().rewards(at(p_.rewards, s, span, first), w + first, count, x);
      std::fill(x + count, x + kChunk, 0.0f);
      lanes().from(x);
      lanes().add_after(after, x, 1, w + first, count, returns + first);
      after = add_rn(after, x[0]);
    }
  }

  void subtract(std::int64_t group) const {
    const OffsetRange range = group_of(p_, group);
    BaselineTail tail;
    std::int64_t longest = 0;
    for (std::int64_t s = range.begin; s < range.end; ++s) {
      longest = std::max(longest, span_of(q_, s).length);
      if (p_.zero_tail != 0) tail.add(s, counts_[static_cast<std::size_t>(s)]);
    }
    for (std::int64_t first = 0; first < longest; first += kChunk) {
      float num[kChunk] = {}, den[kChunk] = {};
      const auto each = [&](const auto& f) {
        for (std::int64_t s = range.begin; s < range.end; ++s) {
          const TokenSpan span = span_of(q_, s);
          const std::int64_t count = std::min(kChunk, span.length - first);
          if (count > 0) f(s, slot(s, span) + first, static_cast<int>(count));
        }
      };
      each([&](std::int64_t, std::int64_t to, int count) {
        lanes().add(p_.returns + to, weights_.data() + to, count, num, den);
      });
      for (int i = 0; i < kChunk; ++i) {
        num[i] = range.end - range.begin == 1 ? 0.0f : div_rn(num[i], add_rn(den[i], p_.eps));
      }
      each([&](std::int64_t s, std::int64_t to, int count) {
        const std::int64_t based = tail.is_of(s) ? std::clamp<std::int64_t>(tail.second - first, 0, count) : count;
        lanes().subtract(p_.returns + to, weights_.data() + to, num, static_cast<int>(based), count,
                         p_.advantages + to);
      });
    }
  }

  const OptimalTokenBaselineParams& p_;
  const Sequences& q_;
  std::vector<float> weights_;
  std::vector<std::int64_t> counts_;
};

}  // namespace

void optimal_token_baseline(const OptimalTokenBaselineParams& p) {
  check_optimal_token_baseline(p);
  check_offset_values(p.sequences);
  check_offset_values({p.group_offsets, p.group_dtype}, p.num_groups, p.sequences.num_sequences, "group_offsets",
                      "the number of sequences", true);
  if (p.sequences.num_slots() == 0) return;
  clear_rest(p.sequences, {p.advantages, p.returns});
  Baseline(p).run();
}

}  // namespace rlk::cpu
