// THE CONTRACT of covariance_mask: which tokens clip-cov and kl-cov single out by the covariance of their log-probability and
// their advantage, what policy_loss takes as `selected`; and which have a high entropy. Rules are those of docs/numerics.md; docs/objectives.md has the
// sources. Written formulas are fp32, one rounding an operation, in the order shown; exp is that of math/. Minimum and
// maximum keep their first operand where the second is no improvement, and so a NaN in it.
//
// Sequences, sums: rlk/tokens.h. A token has l = logprob, o = old_logprob, A = advantage; N the number of tokens of all
// sequences, sum() over these, of a sequence and then over sequences.
//   mean(x)    = fl(sum(x) / N)
//   c          = fl(fl(A - mean(A)) fl(l - mean(l))); kEntropy: l, which is an entropy then, and A and o are not there
//   candidates   kClip: lower < c < upper, and not p2 > p1, where r = exp(fl(l - o)), p1 = fl(-A r),
//                p2 = fl(-A min(max(r, clip_low), clip_high)): a token that PPO clips is none. kKl, kEntropy: every token
//   chosen       the K candidates of the least priority, all where there are fewer; K = max(floor(ratio N), 1), in fp64;
//                kEntropy: and all that are equal to the last of these, K = N - ceil(fl(fl(1 - ratio) fl(N - 1))), in
//                [1, N]: those that are not below the entropy up to which torch.quantile interpolates
//   priority     of 32 bits. kClip: p = word 0 of philox4x32-10, key = seed, counter = [sequence low, sequence high,
//                position, 0], at most 2^32 - 2; so a draw without replacement, which is the same for the same seed.
//                kKl, kEntropy: the largest c first, -0 being +0, a NaN before all. Equal ones: the lower sequence, then the lower
//                position, first
//   selected   = 1 where a token is chosen, else +0
// What a masked slot holds is never looked at. Sequences are numbered by their place in the call. Padded is packed; the same
// bits at any stride and on every backend: what is counted with atomics are integers. Enqueues on `stream`; neither allocates
// nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

enum class CovarianceKind : std::int32_t { kClip, kKl, kEntropy };

struct CovarianceMaskParams {
  Sequences sequences;       // fewer than 2^32 slots
  PolicyTokens logprob;      // [slots]
  PolicyTokens old_logprob;  // [slots]; of kClip alone
  PolicyTokens advantage;    // [slots], or one a sequence; of kEntropy null
  TokenMask mask;            // [slots]; null: every token counts
  CovarianceKind kind = CovarianceKind::kClip;
  float lower = 1.0f, upper = 5.0f;  // these four: kClip
  float clip_low = 0.8f, clip_high = 1.2f;
  double ratio = 0.0002;  // in (0, 1]; of kEntropy also 0
  std::uint64_t seed = 0;
  float* selected = nullptr;  // [slots], contiguous, memory apart from the inputs
  void* workspace = nullptr;  // covariance_mask_workspace_bytes(...), 16-byte aligned
};
std::int64_t covariance_mask_workspace_bytes(const CovarianceMaskParams& p, Device device);
// Bad offsets (docs/tokens.md) are an InvalidArgument on the CPU; on a GPU all of `selected` is NaN.
void covariance_mask(const CovarianceMaskParams& p, Device device, Stream stream);

}  // namespace rlk
