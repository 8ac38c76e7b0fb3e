// THE CONTRACT of `covariance_mask`: a mask of the tokens that clip-cov or kl-cov selects by the covariance of
// log-probability and advantage, or of the tokens with a high entropy. policy_loss takes the mask as `selected`. Rule
// numbers refer to docs/numerics.md; docs/objectives.md has the sources. Formulas are in fp32, in the order shown, with
// one rounding per operation; exp comes from math/. Minimum and maximum return their first operand unless the second is
// strictly better, so a NaN in the first operand stays.
//
// rlk/tokens.h defines slots, sequences and their sums. A token has l = logprob, o = old_logprob, A = advantage. N is
// the number of tokens of all sequences. sum() adds over the tokens of a sequence, then over sequences.
//   mean(x)    = fl(sum(x) / N)
//   c          = fl(fl(A - mean(A)) fl(l - mean(l))). Under kEntropy c = l, where l is an entropy and A and o
//                are absent
//   candidates   kClip: lower < c < upper, and not p2 > p1, where r = exp(fl(l - o)), p1 = fl(-A r),
//                p2 = fl(-A min(max(r, clip_low), clip_high)). So a token that PPO clips is no candidate.
//                kKl, kEntropy: every token is a candidate
//   chosen       the K candidates of least priority, or all candidates if there are fewer than K.
//                K = max(floor(ratio N), 1), in fp64. Under kEntropy K = N - ceil(fl(fl(1 - ratio) fl(N - 1))), in
//                [1, N], and every token equal to the last chosen one is chosen too. torch.quantile interpolates
//                between two entropies; each chosen token has at least the upper of these two
//   priority     32 bits. kClip: p = word 0 of philox4x32-10 with key = seed and
//                counter = [sequence low, sequence high, position, 0], at most 2^32 - 2. So the choice is a draw
//                without replacement, and the same seed draws the same tokens.
//                kKl, kEntropy: the largest c has the least priority. -0 counts as +0, and NaN as larger than any
//                number.
//                Among equal priorities the lower sequence comes first, then the lower position
//   selected   = 1 where a token is chosen, else +0
// No result depends on what a masked slot holds. The number of a sequence is its place in the call. Padded and packed
// sequences have the same bits, at any stride and on every backend. Atomic additions on a GPU add integers alone, so
// their order changes no result. The call enqueues its work on `stream`; it neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

enum class CovarianceKind : std::int32_t { kClip, kKl, kEntropy };

struct CovarianceMaskParams {
  Sequences sequences;       // fewer than 2^32 slots
  PolicyTokens logprob;      // [slots]
  PolicyTokens old_logprob;  // [slots]; used by kClip alone
  PolicyTokens advantage;    // [slots], or one value per sequence; null for kEntropy
  TokenMask mask;            // [slots]; null: every token counts
  CovarianceKind kind = CovarianceKind::kClip;
  float lower = 1.0f, upper = 5.0f;  // used by kClip alone, like clip_low and clip_high
  float clip_low = 0.8f, clip_high = 1.2f;
  double ratio = 0.0002;  // in (0, 1]; kEntropy also takes 0
  std::uint64_t seed = 0;
  float* selected = nullptr;  // [slots], contiguous; must not overlap the inputs
  void* workspace = nullptr;  // covariance_mask_workspace_bytes(...), 16-byte aligned
};
std::int64_t covariance_mask_workspace_bytes(const CovarianceMaskParams& p, Device device);
// For bad offsets (docs/tokens.md) the CPU throws InvalidArgument. On a GPU bad offsets make all of `selected` NaN.
void covariance_mask(const CovarianceMaskParams& p, Device device, Stream stream);

}  // namespace rlk
