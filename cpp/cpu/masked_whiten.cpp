// CPU backend of masked_whiten: sequences are spread over threads in each of three passes.
#include "masked_whiten.h"

#include <vector>

#include "chunk_sum.h"
#include "float_environment.h"
#include "rlk/kernels/masked_whiten_token.h"
#include "rows.h"
#include "sequences.h"
#include "thread_pool.h"

namespace rlk::cpu {
namespace {

struct OfSequence {
  std::int64_t n = 0;
  float sum = 0.0f, least = infinity(), largest = -infinity();
};

class Whitening {
 public:
  explicit Whitening(const MaskedWhitenParams& p) : p_(p) {}

  void run() {
    std::vector<OfSequence> of(static_cast<std::size_t>(p_.sequences.num_sequences));
    const auto sum = [&] {
      return chunk_sum(p_.sequences.num_sequences, [&](std::int64_t s) { return of[static_cast<std::size_t>(s)].sum; });
    };
    for_each_sequence([&](std::int64_t s) { of[static_cast<std::size_t>(s)] = first_pass(s); });
    OfSequence all;
    for (const OfSequence& o : of) {
      all.n += o.n;
      all.least = o.least < all.least ? o.least : all.least;
      all.largest = o.largest > all.largest ? o.largest : all.largest;
    }
    const FloatEnvironment environment;
    statistics_ = whiten_mean(all.n, sum(), all.least, all.largest);
    for_each_sequence([&](std::int64_t s) { of[static_cast<std::size_t>(s)].sum = sum_of_squares(s); });
    whiten_variance(p_, sum(), &statistics_);
    for_each_sequence([&](std::int64_t s) { write(s); });
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

  // A sequence's tokens and whether each counts.
  struct Tokens {
    const MaskedWhitenParams& p;
    SequenceSpan span;
    const float* x;
    std::int64_t mask_at;
    Tokens(const MaskedWhitenParams& params, std::int64_t s)
        : p(params),
          span(span_of(p.sequences, s)),
          x(p.x.data + span.offset(p.x.row_stride)),
          mask_at(span.offset(p.mask.row_stride)) {}
    bool counted(std::int64_t i) const {
      return p.mask.data == nullptr || counts(p.mask.data, p.mask.dtype, mask_at + i);
    }
  };

  OfSequence first_pass(std::int64_t s) const {
    const Tokens t(p_, s);
    OfSequence of;
    of.sum = chunk_sum(t.span.length, [&](std::int64_t i) {
      if (!t.counted(i)) return 0.0f;
      ++of.n;
      of.least = t.x[i] < of.least ? t.x[i] : of.least;
      of.largest = t.x[i] > of.largest ? t.x[i] : of.largest;
      return t.x[i];
    });
    return of;
  }
  float sum_of_squares(std::int64_t s) const {
    const Tokens t(p_, s);
    return chunk_sum(t.span.length, [&](std::int64_t i) {
      if (!t.counted(i)) return 0.0f;
      const float d = whiten_deviation(statistics_, t.x[i]);
      return mul_rn(d, d);
    });
  }
  void write(std::int64_t s) const {
    const Tokens t(p_, s);
    float* y = p_.y.data + t.span.offset(p_.y.row_stride);
    for (std::int64_t i = 0; i < t.span.length; ++i) {
      y[i] = t.counted(i) ? whiten_token(p_, statistics_, t.x[i]) : 0.0f;
    }
  }

  const MaskedWhitenParams& p_;
  WhitenStatistics statistics_;
};

}  // namespace

void masked_whiten(const MaskedWhitenParams& p) {
  check_masked_whiten(p);
  const Sequences& q = p.sequences;
  check_offsets(q.cu_seqlens, q.cu_dtype, q.num_sequences, q.num_tokens, "cu_seqlens", "the number of tokens");
  if (q.num_sequences == 0 || q.num_tokens == 0) {
    WhitenStatistics none;
    return whiten_variance(p, 0.0f, &none);
  }
  Whitening(p).run();
}

}  // namespace rlk::cpu
