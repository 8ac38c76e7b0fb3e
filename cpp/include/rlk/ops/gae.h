// THE CONTRACT of gae, discounted_returns and vtrace: advantages and returns by a scan over the tokens of each sequence, last
// to first. Rules are those of docs/numerics.md. Written formulas are fp32 with the roundings shown, in the order shown.
//
// A token t counts where its mask is not zero. next_t is the value of the nearest later token that counts, else the
// sequence's bootstrap, +0 without one. The step of t is (c_t, d_t):
//   gae                c = fl(gamma * lam)   d = fl(fl(fma(gamma, next_t, reward_t)) - value_t)
//   discounted_returns c = gamma             d = reward_t
//   vtrace             ratio = exp(fl(logprob_t - rollout_logprob_t)) (math/exp.h), rho = min(ratio, rho_bar),
//                      c = fl(fl(gamma * lam) * min(ratio, c_bar)); with rollout_neutral ratio is 1 where rollout_logprob_t
//                      is NaN
//                      d = fl(rho * fl(fl(fma(gamma, next_t, reward_t)) - value_t)); a NaN is its own minimum
// The scan is x_t = advance(c_t, x_{t+1}, d_t), from x = +0 behind the last token; at a token that does not count x is carried
// on, or, for discounted_returns with `reset`, is +0. What such a token's rewards, values and log-probabilities hold is never
// looked at. Outputs:
//   gae                advantage = x_t,  returns = fl(x_t + value_t), or where t does not count fl(x_t + next_t)
//   discounted_returns returns = x_t
//   vtrace             returns (v_t) as of gae;  advantage = fl(rho * fl(fl(fma(gamma, fl(next_t + x_{t+1}), reward_t)) -
//                      value_t)), or where t does not count +0
// Order (rule 10). A product with a coefficient of zero is left out, whatever it multiplies:
//   advance(c, x, d)      = d where c = 0, else fma(c, x, d)
//   (c1, d1) . (c2, d2)   = (0, d1) where c1 = 0, else (fl(c1 * c2), fma(c1, d2, d1)): first 2, then 1
//   A chunk is 128 tokens, [128 k, 128 k + 128) from the sequence's first; tokens behind its last do not count. Lane l of 32
//   has tokens 4l ... 4l + 3 of a chunk. Its block begins as (1, +0); for each of its tokens, last to first: block becomes
//   (c_t, d_t) . block; a token that does not count leaves it, or with `reset` makes it (0, +0).
//   Then for h = 1, 2, 4, 8, 16: block_l becomes block_l . block_{l+h}, all lanes at once, where l + h < 32.
//   x behind chunk k - 1 is advance(c, x behind chunk k, d) with the block of lane 0 of chunk k. x behind lane 31 is x behind
//   its chunk, x behind lane l < 31 is advance(c, x behind the chunk, d) with block_{l+1}. In a lane x_t as above.
// So a row's trailing padding changes no bit, and packed is padded: a sequence has the same bits in any batch, at any
// position and stride, and on every backend. NaN outputs are canonical. A NaN or an infinity that counts is seen by its own
// sequence alone, at its token and before. An empty or wholly masked sequence gives finite values: 0, and for returns of gae
// and vtrace the bootstrap.
// Neither allocates nor synchronises; enqueues on `stream`, which CPU backends ignore. Bad offsets
// (docs/tokens.md): InvalidArgument on the CPU before it writes anything; on a GPU the sequences in doubt are NaN.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

constexpr int kScanChunk = 128;
constexpr int kScanLanes = 32;
constexpr int kScanLaneTokens = 4;

enum class GaeKind : std::uint8_t { kGae, kDiscountedReturns, kVtrace };

struct GaeParams {
  GaeKind kind = GaeKind::kGae;
  Sequences sequences;
  TokenArray<const float> rewards;
  TokenArray<const float> values;           // but for kDiscountedReturns
  TokenArray<const float> logprob;          // kVtrace alone
  TokenArray<const float> rollout_logprob;  // kVtrace alone
  TokenMask mask;
  const float* bootstrap = nullptr;  // [num_sequences], or null; not of kDiscountedReturns
  TokenArray<float> advantages;      // but for kDiscountedReturns; memory apart from all inputs
  TokenArray<float> returns;
  float gamma = 1.0f, lam = 1.0f;      // in [0, 1]
  float rho_bar = 1.0f, c_bar = 1.0f;  // > 0, of kVtrace
  bool reset = false;                  // kDiscountedReturns alone
  bool rollout_neutral = false;        // kVtrace alone
};
void gae(const GaeParams& p, Device device, Stream stream);

}  // namespace rlk
