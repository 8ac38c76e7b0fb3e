// Inner loops of optimal_token_baseline, compiled once per instruction set.
#include "optimal_token_baseline_lanes.h"

#include "token_tile_lanes.h"
// After simd.h, which decides how the functions of math/ are compiled.
#include "rlk/kernels/optimal_baseline_token.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

constexpr int kChunk = kBaselineChunk;

void weights(const float* logprob, const float* sum_p_sq, const float* importance, std::int64_t stride, int count,
             float* w) {
  for (int k = 0; k < count; k += kLanes) {
    const int left = count - k;
    const Floats l = load_tokens(logprob + k, left), q = load_tokens(sum_p_sq + k, left);
    if (importance == nullptr) {
      store_tokens(w + k, left, baseline_weight(l, q));
    } else {
      const Floats s = stride == 0 ? broadcast<Floats>(*importance) : load_tokens(importance + k, left);
      store_tokens(w + k, left, weighted_by(baseline_weight(l, q), s));
    }
  }
}

// Two buffers with a chunk's half of zeros beside what is read, by turns.
void up_to(float* x) {
  constexpr int kHalf = kChunk / 2;
  alignas(64) float buffers[2][kHalf + kChunk] = {};
  std::memcpy(buffers[0] + kHalf, x, sizeof(float) * kChunk);
  int of = 0;
  for (int h = 1; h < kChunk; h *= 2, of ^= 1) {
    const float* const in = buffers[of] + kHalf;
    for (int k = 0; k < kChunk; k += kLanes) {
      store_bytes(buffers[of ^ 1] + kHalf + k, add_rn(load_bytes<Floats>(in + k), load_bytes<Floats>(in + k - h)));
    }
  }
  std::memcpy(x, buffers[of] + kHalf, sizeof(float) * kChunk);
}
void from(float* x) {
  constexpr int kHalf = kChunk / 2;
  alignas(64) float buffers[2][kChunk + kHalf] = {};
  std::memcpy(buffers[0], x, sizeof(float) * kChunk);
  int of = 0;
  for (int h = 1; h < kChunk; h *= 2, of ^= 1) {
    const float* const in = buffers[of];
    for (int k = 0; k < kChunk; k += kLanes) {
      store_bytes(buffers[of ^ 1] + k, add_rn(load_bytes<Floats>(in + k), load_bytes<Floats>(in + k + h)));
    }
  }
  std::memcpy(x, buffers[of], sizeof(float) * kChunk);
}

void add(const float* g, const float* w, int count, float* num, float* den) {
  const Floats zero = broadcast<Floats>(0.0f);
  for (int k = 0; k < count; k += kLanes) {
    const int left = count - k;
    const Floats weight = load_tokens(w + k, left), n = load_tokens(num + k, left), d = load_tokens(den + k, left);
    const auto none = weight < zero;
    store_tokens(num + k, left, select(none, n, fma_rn(load_tokens(g + k, left), weight, n)));
    store_tokens(den + k, left, select(none, d, add_rn(d, weight)));
  }
}

}  // namespace

const OptimalTokenBaselineLanes optimal_token_baseline_lanes = {weights, up_to, from, add};

}  // namespace rlk::cpu::RLK_CPU_ISA
