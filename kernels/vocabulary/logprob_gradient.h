// The gradient of one logit by the contract's formula. Probability is a tag type. Probability::of(t) takes t >= -127
// and computes 2^t by the call's exponential. The result is 0 for t below -126. A t above 127 counts as 127, and a NaN
// stays NaN.
#pragma once

#include "kernels/vocabulary/logprob_row.h"
#include "rlk/math/exp2.h"
#include "rlk/math/expm1.h"

namespace rlk {

// The constants that the contract of ops/logprob.h defines for a row's gradient.
struct BackwardRow {
  float c, u;     // log2 p = fma(z, c, -u)
  float a, b, g;  // the gradient of the target's logit is p (a + b log2 p) + g (1 - p)
  float minus_a;  // fl(a - g); the gradient of any other logit is p (minus_a + b log2 p)
};
struct SmoothedRow : BackwardRow {
  float d;  // term that label smoothing adds to every column; 0 without smoothing
};
RLK_DEVICE float of_every_column(const BackwardRow&) { return 0.0f; }
RLK_DEVICE float of_every_column(const SmoothedRow& r) { return r.d; }

RLK_DEVICE float gradient_at(const float* gradient, const RowLayout& rows, std::int64_t row) {
  return gradient ? gradient[rows.offset(row)] : 0.0f;
}

template <class Probability, class Row>
RLK_DEVICE float column_gradient(float z, const Row& r, bool is_target) {
  const float d = of_every_column(r);
  const float t = fma_rn(z, r.c, -r.u);
  const float clamped = t < -127.0f ? -127.0f : t;  // keeps a NaN
  const float p = Probability::of(clamped);
  if (is_target) {
    const float through_one = mul_rn(-r.g, expm1(mul_rn(kLn2, t)));
    return fma_rn(p, fma_rn(r.b, clamped, r.a), d == 0.0f ? through_one : add_rn(through_one, d));
  }
  return fma_rn(p, fma_rn(r.b, clamped, r.minus_a), d);
}

// The gradient of a logit x, where z is x after the scale and the softcap.
template <class Probability, class Row>
RLK_DEVICE float transformed_gradient(float x, const LogprobInput& p, float inverse, const Row& r, bool is_target) {
  float z = mul_rn(x, p.logit_scale);
  if (p.softcap == 0.0f) return column_gradient<Probability>(z, r, is_target);
  if (abs_of(z) == infinity()) return z < 0.0f ? 0.0f : canonical_nan();
  const float h = tanh(mul_rn(z, inverse));
  z = mul_rn(p.softcap, h);
  return mul_rn(column_gradient<Probability>(z, r, is_target), fma_rn(-h, h, 1.0f));
}

// The target and the incoming gradients of a row. If the function empty() returns true, the row's logits are not read.
struct RowGradient {
  std::int64_t target;
  float dlogprob, dlse, dentropy;
  RLK_DEVICE bool empty(std::int64_t ignore_index) const {
    return target == ignore_index || (dlogprob == 0.0f && dlse == 0.0f && dentropy == 0.0f);
  }
};
RLK_DEVICE RowGradient row_gradient(const LogprobBackwardParams& p, std::int64_t row) {
  return {target_of(p, row), gradient_at(p.dlogprob, p.dlogprob_rows, row), gradient_at(p.dlse, p.dlse_rows, row),
          gradient_at(p.dentropy, p.dentropy_rows, row)};
}

RLK_DEVICE BackwardRow backward_row(const LogprobBackwardParams& p, const RowGradient& g, std::int64_t row) {
  const float temperature = temperature_of(p, row);
  const float k = div_rn(p.logit_scale, temperature);
  const float entropy = p.dentropy ? p.entropy[row] : 0.0f;
  const bool bad_target = g.target < 0 || g.target >= p.valid_vocab;
  BackwardRow r;
  r.c = log2_scale(temperature);
  r.u = mul_rn(p.lse[row], kLog2e);
  r.a = mul_rn(fma_rn(-g.dentropy, entropy, g.dlse), k);
  r.b = mul_rn(mul_rn(-g.dentropy, kLn2), k);
  r.g = bad_target && g.dlogprob != 0.0f ? canonical_nan() : mul_rn(g.dlogprob, k);
  r.minus_a = sub_rn(r.a, r.g);
  return r;
}

// The constants of a row with or without label smoothing. Without smoothing they are those of backward_row, and d = 0.
RLK_DEVICE SmoothedRow smoothed_row(const LogprobBackwardParams& p, const RowGradient& g, std::int64_t row) {
  if (p.label_smoothing == 0.0f) return {backward_row(p, g, row), 0.0f};
  RowGradient of = g;
  of.dlogprob = mul_rn(sub_rn(1.0f, p.label_smoothing), g.dlogprob);
  of.dlse = fma_rn(-p.label_smoothing, g.dlogprob, g.dlse);
  const float k = div_rn(p.logit_scale, temperature_of(p, row));
  return {backward_row(p, of, row),
          div_rn(mul_rn(mul_rn(p.label_smoothing, g.dlogprob), k), static_cast<float>(p.valid_vocab))};
}
RLK_DEVICE void set_row(const LogprobBackwardParams& p, const RowGradient& g, std::int64_t row, BackwardRow* to) {
  *to = backward_row(p, g, row);
}
RLK_DEVICE void set_row(const LogprobBackwardParams& p, const RowGradient& g, std::int64_t row, SmoothedRow* to) {
  *to = smoothed_row(p, g, row);
}

}  // namespace rlk
