// A second implementation of gae, discounted_returns and vtrace, slow and independent of the backends, written from the
// contract, ops/gae.h. The reference shares only the exponential with the backends.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "rlk/math/exp.h"
#include "rlk/ops/gae.h"

namespace gae_test {

using rlk::GaeKind;
using rlk::GaeParams;

struct Block {
  float c = 1.0f, d = 0.0f;
};

inline float advance(float c, float x, float d) { return c == 0.0f ? d : std::fma(c, x, d); }
inline Block then(const Block& first, const Block& second) {  // second . first
  if (second.c == 0.0f) return {0.0f, second.d};
  return {second.c * first.c, std::fma(second.c, first.d, second.d)};
}

struct Token {
  bool counts = false;
  float reward = 0, value = 0, logprob = 0, rollout_logprob = 0, next = 0, rho = 0;
  Block step;
  float x_after = 0, x = 0;
};

struct Outputs {
  std::vector<float> advantages, returns;
};

inline float least(float x, float bound) { return x > bound ? bound : x; }

// Outputs of one sequence; `tokens` holds the tokens that count.
inline Outputs reference(const GaeParams& p, std::vector<Token> tokens, float bootstrap) {
  const bool values = p.kind != GaeKind::kDiscountedReturns, resets = !values && p.reset;
  const std::size_t length = tokens.size();
  while (tokens.size() % 128 != 0) tokens.emplace_back();
  float next = values ? bootstrap : 0.0f;
  const float decay = p.gamma * p.lam;
  for (std::size_t i = tokens.size(); i-- > 0;) {
    Token& t = tokens[i];
    t.next = next;
    if (!t.counts) continue;
    next = t.value;
    if (!values) {
      t.step = {p.gamma, t.reward};
      continue;
    }
    const float delta = std::fma(p.gamma, t.next, t.reward) - t.value;
    if (p.kind == GaeKind::kGae) {
      t.step = {decay, delta};
    } else {
      const float ratio =
          p.rollout_neutral && std::isnan(t.rollout_logprob) ? 1.0f : rlk::exp(t.logprob - t.rollout_logprob);
      t.rho = least(ratio, p.rho_bar);
      t.step = {decay * least(ratio, p.c_bar), t.rho * delta};
    }
  }
  float x_chunk = 0.0f;
  for (std::size_t chunk = tokens.size() / 128; chunk-- > 0;) {
    Token* of_chunk = &tokens[chunk * 128];
    std::vector<Block> blocks(32);
    for (int l = 0; l < 32; ++l) {
      for (int j = 3; j >= 0; --j) {
        const Token& t = of_chunk[4 * l + j];
        if (t.counts) blocks[l] = then(blocks[l], t.step);
        if (!t.counts && resets) blocks[l] = {0.0f, 0.0f};
      }
    }
    for (int h = 1; h <= 16; h *= 2) {
      const std::vector<Block> before = blocks;
      for (int l = 0; l + h < 32; ++l) blocks[l] = then(before[l + h], before[l]);
    }
    for (int l = 0; l < 32; ++l) {
      float x = l == 31 ? x_chunk : advance(blocks[l + 1].c, x_chunk, blocks[l + 1].d);
      for (int j = 3; j >= 0; --j) {
        Token& t = of_chunk[4 * l + j];
        t.x_after = x;
        if (t.counts) x = advance(t.step.c, x, t.step.d);
        if (!t.counts && resets) x = 0.0f;
        t.x = x;
      }
    }
    x_chunk = advance(blocks[0].c, x_chunk, blocks[0].d);
  }
  Outputs out;
  const auto put = [](std::vector<float>* to, float x) {
    to->push_back(std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x);
  };
  for (std::size_t i = 0; i < length; ++i) {
    const Token& t = tokens[i];
    if (!values) {
      put(&out.returns, t.x);
      continue;
    }
    put(&out.returns, t.x + (t.counts ? t.value : t.next));
    float advantage = t.x;
    if (p.kind == GaeKind::kVtrace) {
      const float gain = std::fma(p.gamma, t.next + t.x_after, t.reward);
      advantage = t.counts ? t.rho * (gain - t.value) : 0.0f;
    }
    put(&out.advantages, advantage);
  }
  return out;
}

}  // namespace gae_test
