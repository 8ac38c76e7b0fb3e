// THE CONTRACT of `gae`, `discounted_returns` and `vtrace`: computes advantages and returns by a scan over the tokens
// of each sequence, from the last token to the first. Rule numbers refer to docs/numerics.md. Formulas are in fp32,
// with the roundings and the order that they show.
//
// A token t counts where its mask is not zero. next_t is the value of the nearest later token that counts. If there is
// no later token that counts, next_t is the sequence's bootstrap, or +0 without a bootstrap. The step of token t is
// (c_t, d_t):
//   gae                c = fl(gamma * lam)   d = fl(fl(fma(gamma, next_t, reward_t)) - value_t)
//   discounted_returns c = gamma             d = reward_t
//   vtrace             ratio = exp(fl(logprob_t - rollout_logprob_t)) (math/exp.h), rho = min(ratio, rho_bar),
//                      c = fl(fl(gamma * lam) * min(ratio, c_bar)). With rollout_neutral, ratio is 1 where
//                      rollout_logprob_t is NaN
//                      d = fl(rho * fl(fl(fma(gamma, next_t, reward_t)) - value_t)). min of a NaN and a number is that
//                      NaN
// The scan is x_t = advance(c_t, x_{t+1}, d_t), from x = +0 after the last token. A token that does not count leaves x
// unchanged; for discounted_returns with `reset` it sets x to +0 instead. Rewards, values and log-probabilities of a
// token that does not count are never used. Outputs:
//   gae                advantage = x_t,  returns = fl(x_t + value_t); fl(x_t + next_t) where t does not count
//   discounted_returns returns = x_t
//   vtrace             returns (v_t) as for gae;
//                      advantage = fl(rho * fl(fl(fma(gamma, fl(next_t + x_{t+1}), reward_t)) - value_t)); +0 where t
//                      does not count
// Order (rule 10). A product with a zero coefficient is left out, even if its other factor is infinite or NaN:
//   advance(c, x, d)      = d where c = 0, else fma(c, x, d)
//   (c1, d1) . (c2, d2)   = (0, d1) where c1 = 0, else (fl(c1 * c2), fma(c1, d2, d1)): applies step 2, then step 1
//   A chunk is 128 tokens, [128 k, 128 k + 128), counted from the sequence's first token. Places past the sequence's
//   last token do not count. Lane l of 32 has tokens 4l ... 4l + 3 of a chunk.
//   Each lane has a block, a pair (c, d) like a step, which begins as (1, +0). For each of the lane's tokens, last to
//   first, block becomes (c_t, d_t) . block. A token that does not count leaves the block as it is, or with `reset`
//   makes it (0, +0).
//   Then for h = 1, 2, 4, 8, 16: block_l becomes block_l . block_{l+h}, for all lanes at once, where l + h < 32.
//   x after chunk k - 1 is advance(c, x after chunk k, d), where (c, d) is the block of lane 0 of chunk k. Lane 31
//   begins with x after its chunk. x after lane l < 31 is advance(c, x after the chunk, d), where (c, d) is
//   block_{l+1}. Within a lane, x_t = advance(c_t, x_{t+1}, d_t).
// So trailing padding changes no result, and padded and packed sequences have the same bits. A sequence has the same
// bits in any batch, at any position and stride, and on every backend. Every NaN output is the canonical NaN. A NaN or
// an infinity at a token that counts affects its own sequence alone, at this token and at earlier tokens. An empty or
// wholly masked sequence gives finite values: the output `returns` of `gae` and `vtrace` is the bootstrap, and all
// other outputs are 0. The call enqueues its work on `stream`, which CPU backends ignore; it neither allocates nor
// synchronises. With bad offsets (docs/tokens.md) the CPU throws InvalidArgument before it writes anything. On a GPU
// the outputs of invalid sequences are NaN: sequences with a bad offset, and the sequences before and after them.
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
  TokenArray<const float> values;           // required except for kDiscountedReturns
  TokenArray<const float> logprob;          // for kVtrace alone
  TokenArray<const float> rollout_logprob;  // for kVtrace alone
  TokenMask mask;
  const float* bootstrap = nullptr;  // [num_sequences], or null; not for kDiscountedReturns
  TokenArray<float> advantages;      // required except for kDiscountedReturns; overlaps no input
  TokenArray<float> returns;
  float gamma = 1.0f, lam = 1.0f;      // in [0, 1]
  float rho_bar = 1.0f, c_bar = 1.0f;  // > 0; used by kVtrace
  bool reset = false;                  // for kDiscountedReturns alone
  bool rollout_neutral = false;        // for kVtrace alone
};
void gae(const GaeParams& p, Device device, Stream stream);

}  // namespace rlk
