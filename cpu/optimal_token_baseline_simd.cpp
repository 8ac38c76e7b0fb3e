// The inner loops of the operator `optimal_token_baseline`. CMake compiles this file once per instruction set.
#include "optimal_token_baseline_simd.h"

#include "kernels/advantages/optimal_baseline_token.h"
#include "tokens/tile_simd.h"

namespace rlk::cpu::RLK_CPU_ISA {
namespace {

constexpr int kChunk = kBaselineChunk;

void mask_of(const TokenMask& mask, std::int64_t at, int count, std::int32_t* counted) {
  load_mask(mask, at, count, counted);
}

void weights(const float* logprob, const float* sum_p_sq, const float* importance, std::int64_t stride,
             const std::int32_t* counted, int count, float* w) {
  for (int k = 0; k < count; k += kLanes) {
    const int left = count - k;
    Floats x = baseline_weight(load_tokens(logprob + k, left), load_tokens(sum_p_sq + k, left));
    if (importance != nullptr) {
      x = weighted_by(x, stride == 0 ? broadcast<Floats>(*importance) : load_tokens(importance + k, left));
    }
    store_tokens(w + k, left, where(Mask{load_bytes<Ints>(counted + k).v}, x));
  }
}

void add_before(float before, const float* x, const std::int32_t* counted, int count, float* w) {
  for (int k = 0; k < count; k += kLanes) {
    const int left = count - k;
    const Floats sum = add_rn(broadcast<Floats>(before), load_tokens(x + k, left));
    store_tokens(w + k, left, select(Mask{load_bytes<Ints>(counted + k).v}, sum, broadcast<Floats>(kNoWeight)));
  }
}

// Whether a token counts, judged by its W. The W of a token that counts is never kNoWeight: it is NaN or not negative.
RLK_HD Mask is_counted(Floats w) { return ~(w == broadcast<Floats>(kNoWeight)); }

void rewards_of(const float* rewards, const float* w, int count, float* x) {
  for (int k = 0; k < count; k += kLanes) {
    const int left = count - k;
    store_tokens(x + k, left, where(is_counted(load_tokens(w + k, left)), load_tokens(rewards + k, left)));
  }
}

void add_after(float after, const float* x, int x_stride, const float* w, int count, float* returns) {
  for (int k = 0; k < count; k += kLanes) {
    const int left = count - k;
    const Floats of = x_stride == 0 ? broadcast<Floats>(*x) : load_tokens(x + k, left);
    const Floats sum = add_rn(broadcast<Floats>(after), of);
    store_tokens(returns + k, left, where(is_counted(load_tokens(w + k, left)), finite_or_canonical(sum)));
  }
}

void subtract(const float* returns, const float* w, const float* baseline, int based, int count, float* advantages) {
  for (int k = 0; k < count; k += kLanes) {
    const int left = count - k, has = based - k;
    Floats b = broadcast<Floats>(0.0f);
    if (has > 0) b = load_tokens(baseline + k, has);
    const Floats x = sub_rn(load_tokens(returns + k, left), b);
    store_tokens(advantages + k, left, where(is_counted(load_tokens(w + k, left)), finite_or_canonical(x)));
  }
}

// The loop alternates between two buffers. Each buffer has kHalf zeros in front of its data.
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

const OptimalTokenBaselineLanes optimal_token_baseline_simd = {mask_of,  weights, add_before, rewards_of, add_after,
                                                               subtract, up_to,   from,       add};

}  // namespace rlk::cpu::RLK_CPU_ISA
