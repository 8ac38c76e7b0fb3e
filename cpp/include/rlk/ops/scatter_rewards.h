// THE CONTRACT of scatter_rewards: rewards of sequences, of spans and of tokens as one reward a token, what gae and
// discounted_returns take; a cost beside it. Rules are those of docs/numerics.md. Written formulas are fp32 with the roundings
// shown, in the order shown.
//
// Sequences: rlk/tokens.h. n is the number of a sequence's tokens that count, `last` the last of these.
//   token   x = token_reward, +0 without one; with an estimator x = fl(x - fl(kl_coef * K)), K the kl of ops/kl.h without a
//           weight, under the same limits
//   spans   a sequence's, [begin, end) in positions, ascending by their index; m the number of a span's tokens that count:
//     kLast, kFirst  x = fl(x + reward) at the last, at the first of them
//     kSpread        x = fl(x + fl(reward / m)) at each
//   reward  R = reward of the sequence, +0 without one
//           R = fl(R - fl(length_penalty * n))
//           R = fl(R + min(fl(fl((overlong_begin - n) / overlong_buffer) * overlong_penalty), 0)); integers are rounded to
//           fp32 after their difference
//           x = fl(x + R) at `last`
// rewards = x. costs = cost of the sequence at `last`, else +0. combined = fl(x - fl(lagrange * costs)), of a
// lagrange of 0 x, and with normalize_lagrange fl(that / fl(1 + lagrange)); NaN of a lagrange on the device that is negative,
// infinite or NaN. lengths = n.
// A sequence or a span without a token that counts has no place for its reward, which is then in no output. A NaN is no
// reward that is left out: it is in its sequence's output, at its own place. So is an infinity.
// Masked tokens: +0, and nothing in a masked slot decides a bit. No zero has a sign, and NaN results are canonical. A sequence
// has the same bits padded or packed, in any batch, at any strides, and on every backend.
// A span that is not 0 <= begin <= end <= length, or span_offsets that do not ascend from 0 to num_spans: the CPU throws
// InvalidArgument before it writes anything. On a GPU R of that sequence is NaN, and its spans from there on have no reward.
// Bad offsets (docs/tokens.md): InvalidArgument on the CPU. On a GPU the sequences beside them have NaN rewards and lengths
// of 0, and slots of no sequence are not written.
// Enqueues on `stream`; neither allocates nor synchronises.
#pragma once

#include <cstdint>
#include <limits>

#include "rlk/base.h"
#include "rlk/ops/kl.h"
#include "rlk/tokens.h"

namespace rlk {

enum class SpanPlace : std::int32_t { kLast, kFirst, kSpread };

struct RewardSpec {
  KlEstimator kl = KlEstimator::kNone;  // kNone: no KL, whatever is given
  float kl_coef = 0.0f;
  float kl_input_limit = std::numeric_limits<float>::infinity(), kl_limit = std::numeric_limits<float>::infinity();
  float length_penalty = 0.0f;
  float overlong_penalty = 0.0f;                         // >= 0
  std::int64_t overlong_begin = 0, overlong_buffer = 1;  // the buffer > 0
  SpanPlace place = SpanPlace::kLast;
  std::int32_t normalize_lagrange = 0;
};

struct ScatterRewardsParams {
  Sequences sequences;
  TokenMask mask;              // [slots]; null: every token counts
  PolicyTokens rewards;        // [num_sequences], token_stride 0, or null; so for all inputs
  PolicyTokens token_rewards;  // [slots]
  PolicyTokens logprob;        // [slots]; of an estimator
  PolicyTokens ref_logprob;    // [slots]; of an estimator
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
