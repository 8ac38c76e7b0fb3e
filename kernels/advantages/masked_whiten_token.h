// The formulas of ops/masked_whiten.h that follow the sums, and the memory that passes share. All backends use this
// file.
#pragma once

#include "rlk/math/ieee.h"
#include "rlk/math/moment_scale.h"
#include "rlk/ops/masked_whiten.h"
#include "rlk/tokens.h"

namespace rlk {

struct WhitenStatistics {
  std::int64_t n = 0;
  float mean = 0.0f, rstd = 0.0f;
  MomentScale scale;
  std::int32_t constant = 0;
};

inline void check_masked_whiten(const MaskedWhitenParams& p) {
  check_sequences(p.sequences, p.mask);
  if (p.sequences.num_sequences == 0 || p.sequences.num_tokens == 0) return;
  RLK_CHECK(p.x.data != nullptr && p.y.data != nullptr, "masked_whiten: x and y are given");
}

// `sum` is the sum of all unmasked values. `least` and `largest` are the extremes of these values and ignore NaNs.
RLK_HD WhitenStatistics whiten_mean(std::int64_t n, float sum, float least, float largest) {
  WhitenStatistics s;
  s.n = n;
  s.constant = n > 0 && least == largest && !is_nan(sum) ? 1 : 0;
  if (n > 0) s.mean = s.constant ? add_rn(largest, 0.0f) : div_rn(sum, static_cast<float>(n));
  if (n > 0 && s.constant == 0) s.scale = moment_scale(least, largest);
  return s;
}
template <class F>
RLK_HD F whiten_deviation(const WhitenStatistics& s, F x) {
  F d = broadcast<F>(0.0f);
  if (s.constant == 0) d = sub_rn(mul_rn(x, broadcast<F>(s.scale.down)), broadcast<F>(mul_rn(s.mean, s.scale.down)));
  return d;
}
template <class F>
RLK_HD F whiten_square(const WhitenStatistics& s, F x) {
  const F d = mul_rn(whiten_deviation(s, x), broadcast<F>(s.scale.up));
  return mul_rn(d, d);
}
RLK_HD void whiten_variance(const MaskedWhitenParams& p, float sum_of_squares, WhitenStatistics* s) {
  const std::int64_t divisor = p.unbiased ? s->n - 1 : s->n;
  const float down = s->scale.down;
  float v = s->constant || s->n == 0 ? 0.0f : div_rn(sum_of_squares, static_cast<float>(divisor));
  v = unscaled_square(v, s->scale.up);
  s->rstd = div_rn(1.0f, sqrt_rn(add_rn(v, mul_rn(mul_rn(p.eps, down), down))));
  const float var = unscaled_square(v, down);
  if (p.mean != nullptr) *p.mean = select(is_nan(s->mean), canonical_nan(), s->mean);
  if (p.var != nullptr) *p.var = select(is_nan(var), canonical_nan(), var);
}
template <class F>
RLK_HD F whiten_token(const MaskedWhitenParams& p, const WhitenStatistics& s, F x) {
  F y = mul_rn(whiten_deviation(s, x), broadcast<F>(s.rstd));
  if (!p.shift_mean) y = add_rn(y, broadcast<F>(s.mean));
  return select(is_nan(y), broadcast<F>(canonical_nan()), y);
}

// Memory on a GPU: the statistics, and for each sequence the number of unmasked tokens with their sum, minimum and
// maximum.
struct WhitenMemory {
  WhitenStatistics* statistics;
  std::int64_t* counts;
  float *sums, *least, *largest;
  RLK_HD explicit WhitenMemory(const MaskedWhitenParams& p)
      : statistics(static_cast<WhitenStatistics*>(p.workspace)),
        counts(reinterpret_cast<std::int64_t*>(statistics + 1)),
        sums(reinterpret_cast<float*>(counts + p.sequences.num_sequences)),
        least(sums + p.sequences.num_sequences),
        largest(least + p.sequences.num_sequences) {}
};
inline std::int64_t whiten_workspace_bytes(const MaskedWhitenParams& p) {
  return static_cast<std::int64_t>(sizeof(WhitenStatistics)) + p.sequences.num_sequences * (8 + 3 * 4);
}

}  // namespace rlk
