// Vector code for softmax: the hardware's exponential, rescaled sums, and probabilities of a backward.
#pragma once

#include "rlk/math/exp2.h"
#include "rlk/math/mufu_model.h"
#include "rlk/ops/logprob.h"
#include "simd.h"

namespace rlk::cpu::RLK_CPU_ISA {

// ex2.approx.ftz of `count` values in place.
RLK_HD void exp2_hardware(float* x, int count) {
  for (int i = 0; i < count; ++i) x[i] = mufu_ex2_sm90_bounded(x[i]);
}

// rlk::scale_down in every lane.
RLK_HD Floats scale_down(Floats x, Ints d) {
  const Ints bits = bits_of(x);
  const Ints exponent = (bits >> 23) & 0xff;
  const Floats scaled = select(exponent + d < 1, broadcast<Floats>(0.0f), float_of(bits + (d << 23)));
  return select(exponent == 0xff, x, scaled);
}

// 2^min(t, 127), or 0 where t < -126. The result for a NaN is arbitrary.
template <Exp kExp>
RLK_HD Floats probability(Floats t) {
  const Floats zero = broadcast<Floats>(0.0f), least = broadcast<Floats>(-126.0f), most = broadcast<Floats>(127.0f);
  const Floats bounded = select(t > most, most, t);
  Floats p;
  if constexpr (kExp == Exp::kHardware) {
    alignas(64) float v[kLanes];
    store_bytes(v, select(bounded >= least, bounded, zero));
    exp2_hardware(v, kLanes);
    p = load_bytes<Floats>(v);
  } else {
    p = exp2_normal(bounded);
  }
  return select(t < least, zero, p);
}

}  // namespace rlk::cpu::RLK_CPU_ISA
