// The inner loops of optimal_token_baseline, one copy per instruction set (optimal_token_baseline_lanes.cpp). Memory has any
// alignment.
#pragma once

#include <cstdint>

#include "rlk/ops/optimal_token_baseline.h"

namespace rlk::cpu {

struct OptimalTokenBaselineLanes {
  // w[i] of `count` tokens; importance: [count] with stride 1, one with stride 0, or null.
  void (*weights)(const float* logprob, const float* sum_p_sq, const float* importance, std::int64_t stride, int count,
                  float* w);
  // Sums of a chunk up to each, and from each on; x is overwritten.
  void (*up_to)(float* x);
  void (*from)(float* x);
  // num = fma(g, w, num) and den += w where w is not kNoWeight.
  void (*add)(const float* g, const float* w, int count, float* num, float* den);
};

namespace baseline {
extern const OptimalTokenBaselineLanes optimal_token_baseline_lanes;
}
#if defined(__x86_64__)
namespace avx2 {
extern const OptimalTokenBaselineLanes optimal_token_baseline_lanes;
}
namespace avx512 {
extern const OptimalTokenBaselineLanes optimal_token_baseline_lanes;
}
#endif

}  // namespace rlk::cpu
