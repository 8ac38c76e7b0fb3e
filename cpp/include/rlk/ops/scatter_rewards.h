// THE CONTRACT of `scatter_rewards`: makes one reward per token from rewards of sequences, spans and tokens. The
// operators `gae` and `discounted_returns` take the result. The operator can also place one cost per sequence in the
// same way. Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they
// show.
//
// rlk/tokens.h defines slots and sequences. n is the number of a sequence's tokens that count, and `last` is the last
// of these tokens.
//   token   x = token_reward, or +0 if none is given. With an estimator x = fl(x - fl(kl_coef * K)), where K is the kl
//           of ops/kl.h without a weight, with the limits kl_input_limit and kl_limit
//   spans   [begin, end) in positions of the sequence, taken in ascending order of their index. m is the number of a
//           span's tokens that count:
//     kLast, kFirst  x = fl(x + reward) at the last or the first of these tokens
//     kSpread        x = fl(x + fl(reward / m)) at each of them
//   reward  R = reward of the sequence, or +0 if none is given
//           R = fl(R - fl(length_penalty * n))
//           R = fl(R + min(fl(fl((overlong_begin - n) / overlong_buffer) * overlong_penalty), 0)). Integers are rounded
//           to fp32 after they are subtracted
//           x = fl(x + R) at `last`
// rewards = x. costs = the sequence's cost at its token `last`, and +0 at all other tokens.
// combined = fl(x - fl(lagrange * costs)), or x if lagrange is 0. With normalize_lagrange combined is then divided:
// fl(combined / fl(1 + lagrange)). A lagrange on the device that is negative, infinite or NaN makes combined NaN.
// lengths = n.
// A sequence or span without a token that counts has no place for its reward, so no output contains it. NaN and
// infinite rewards are not left out: they appear in their sequence's output, at their own place.
// Outputs of masked tokens are +0, and no result depends on what a masked slot holds. Every zero is +0, and every NaN
// result is the canonical NaN. A sequence has the same bits padded or packed, in any batch, at any strides, and on
// every backend.
// The CPU throws InvalidArgument before it writes anything for a span that violates 0 <= begin <= end <= length. It
// also throws for span_offsets that do not ascend from 0 to num_spans. On a GPU R is NaN in a sequence with such a
// fault. The bad span and the sequence's later spans add no reward. With bad offsets (docs/tokens.md) the CPU throws
// InvalidArgument. On a GPU the sequences next to a bad offset have NaN rewards and lengths of 0, and slots outside
// every sequence are not written. The call enqueues its work on `stream`; it neither allocates nor synchronises.
#pragma once

#include <cstdint>
#include <limits>

#include "rlk/base.h"
#include "rlk/ops/kl.h"
#include "rlk/tokens.h"

namespace rlk {

enum class SpanPlace : std::int32_t { kLast, kFirst, kSpread };

struct RewardSpec {
  KlEstimator kl = KlEstimator::kNone;  // kNone: no KL term, even if logprob is given
  float kl_coef = 0.0f;
  float kl_input_limit = std::numeric_limits<float>::infinity(), kl_limit = std::numeric_limits<float>::infinity();
  float length_penalty = 0.0f;
  float overlong_penalty = 0.0f;                         // >= 0
  std::int64_t overlong_begin = 0, overlong_buffer = 1;  // overlong_buffer > 0
  SpanPlace place = SpanPlace::kLast;
  std::int32_t normalize_lagrange = 0;
};

struct ScatterRewardsParams {
  Sequences sequences;
  TokenMask mask;              // [slots]; null: every token counts
  PolicyTokens rewards;        // [num_sequences], token_stride 0, or null; every input may be null
  PolicyTokens token_rewards;  // [slots]
  PolicyTokens logprob;        // [slots]; needed with an estimator
  PolicyTokens ref_logprob;    // [slots]; needed with an estimator
  PolicyTokens cost;           // [num_sequences], token_stride 0
  Offsets spans;               // [num_spans, 2] kInt32 or kInt64, contiguous
  Offsets span_offsets;        // [num_sequences + 1]: sequence s has spans [span_offsets[s], span_offsets[s + 1])
  const float* span_rewards = nullptr;  // [num_spans], contiguous
  std::int64_t num_spans = 0;
  const float* lagrange = nullptr;  // one element on the device, or null: lagrange_value
  float lagrange_value = 0.0f;
  RewardSpec spec;
  float* to_tokens = nullptr;       // [slots], contiguous: rewards
  float* costs = nullptr;           // [slots], contiguous, or null: not wanted
  float* combined = nullptr;        // [slots], contiguous, or null: not wanted
  std::int64_t* lengths = nullptr;  // [num_sequences]
  void* workspace = nullptr;        // scatter_rewards_workspace_bytes(...), 16-byte aligned
};
std::int64_t scatter_rewards_workspace_bytes(const ScatterRewardsParams& p, Device device);
void scatter_rewards(const ScatterRewardsParams& p, Device device, Stream stream);

}  // namespace rlk
