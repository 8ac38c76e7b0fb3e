// The inner loops of the operator `optimal_token_baseline`. CMake compiles optimal_token_baseline_simd.cpp once per
// instruction set. The arrays may have any alignment.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/optimal_token_baseline.h"

namespace rlk::cpu {

struct OptimalTokenBaselineLanes {
  // counted[i] = -1 if token `at` + i counts, else 0; whole vectors are written.
  void (*mask)(const TokenMask& mask, std::int64_t at, int count, std::int32_t* counted);
  // w[i] of `count` tokens, 0 where a token does not count. `importance` is [count] with stride 1, one value with
  // stride 0, or null.
  void (*weights)(const float* logprob, const float* sum_p_sq, const float* importance, std::int64_t stride,
                  const std::int32_t* counted, int count, float* w);
  // W = before + x, or kNoWeight where a token does not count.
  void (*add_before)(float before, const float* x, const std::int32_t* counted, int count, float* w);
  // x = rewards where W is not kNoWeight, else 0.
  void (*rewards)(const float* rewards, const float* w, int count, float* x);
  // returns = after + x, or 0 where W is kNoWeight. With x_stride 0, x[0] is used for all tokens.
  void (*add_after)(float after, const float* x, int x_stride, const float* w, int count, float* returns);
  // advantages = returns - baseline, or 0 where W is kNoWeight. Only the first `based` tokens have a baseline.
  void (*subtract)(const float* returns, const float* w, const float* baseline, int based, int count,
                   float* advantages);
  // Sums of a chunk up to each token, and from each token on; x is overwritten.
  void (*up_to)(float* x);
  void (*from)(float* x);
  // num = fma(g, w, num) and den += w where w is not kNoWeight.
  void (*add)(const float* g, const float* w, int count, float* num, float* den);
};

RLK_CPU_LANES(OptimalTokenBaselineLanes, optimal_token_baseline_simd)

}  // namespace rlk::cpu
