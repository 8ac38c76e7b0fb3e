// CPU backend of the operator `masked_whiten`: three passes, each of which spreads sequences over threads.
#include "rlk/ops/masked_whiten.h"

#include <vector>

#include "float_environment.h"
#include "kernels/advantages/masked_whiten_token.h"
#include "masked_whiten_simd.h"
#include "rlk/backends.h"
#include "rows.h"
#include "thread_pool.h"
#include "tokens/passes.h"
#include "tree_sum.h"

namespace rlk::cpu {
namespace {

const MaskedWhitenLanes& lanes() { return RLK_CPU_LANES_IN_USE(masked_whiten_simd); }

class Whitening {
 public:
  explicit Whitening(const MaskedWhitenParams& p) : p_(p) {}

  void run() {
    const FloatEnvironment environment;  // minima and maxima must keep subnormals, too
    std::vector<WhitenSums> of(static_cast<std::size_t>(p_.sequences.num_sequences));
    const auto sum = [&] {
      return tree_sum(p_.sequences.num_sequences, [&](std::int64_t s) { return of[static_cast<std::size_t>(s)].sum; });
    };
    for_each_sequence([&](std::int64_t s) { of[static_cast<std::size_t>(s)] = lanes().sums(tokens(s)); });
    WhitenSums all = {0, 0.0f, infinity(), -infinity()};
    for (const WhitenSums& o : of) {
      all.n += o.n;
      all.least = o.least < all.least ? o.least : all.least;
      all.largest = o.largest > all.largest ? o.largest : all.largest;
    }
    WhitenStatistics statistics = whiten_mean(all.n, sum(), all.least, all.largest);
    for_each_sequence(
        [&](std::int64_t s) { of[static_cast<std::size_t>(s)].sum = lanes().squares(tokens(s), statistics); });
    whiten_variance(p_, sum(), &statistics);
    for_each_sequence([&](std::int64_t s) {
      lanes().write(tokens(s), p_, statistics, p_.y.data + span_of(p_.sequences, s).offset(p_.y.row_stride));
    });
  }

 private:
  template <class F>
  void for_each_sequence(const F& f) const {
    const Sequences& q = p_.sequences;
    const std::int64_t length = q.cu_seqlens == nullptr ? q.num_tokens : q.num_tokens / q.num_sequences;
    parallel_for(q.num_sequences, rows_of_a_task(length), [&](std::int64_t begin, std::int64_t end) {
      const FloatEnvironment environment;
      for (std::int64_t s = begin; s < end; ++s) f(s);
    });
  }
  WhitenTokens tokens(std::int64_t s) const {
    const TokenSpan span = span_of(p_.sequences, s);
    return {p_.x.data + span.offset(p_.x.row_stride), p_.mask, span.offset(p_.mask.row_stride), span.length};
  }

  const MaskedWhitenParams& p_;
};

}  // namespace

void masked_whiten(const MaskedWhitenParams& p) {
  check_masked_whiten(p);
  const Sequences& q = p.sequences;
  check_offset_values(q);
  clear_rest(q, {p.y.data});
  if (q.num_sequences == 0 || q.num_tokens == 0) {
    WhitenStatistics none;
    return whiten_variance(p, 0.0f, &none);
  }
  Whitening(p).run();
}

}  // namespace rlk::cpu
