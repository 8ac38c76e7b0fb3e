// THE CONTRACT of `masked_whiten`: shifts and scales the values of the tokens that count, so that their mean is 0 and
// their variance is 1 over all sequences of a batch. Rule numbers refer to docs/numerics.md. Formulas are in fp32, with
// the roundings and the order that they show.
//
//   sum(f) : for a sequence, the perfect binary tree over its positions (math/tree_sum.h), +0 for tokens that do not
//            count. The sum of the batch is the tree over the sums of its sequences.
//   n      = number of tokens that count;  mean = fl(sum(x) / n)
//   a, b   : powers of two, a <= 1 <= b, from the least and the largest x (math/moment_scale.h); 1 where all x are
//            equal
//   d      = fl(fl(a x) - fl(a mean))
//   v      = fl(sum(fl(e * e)) / (n - 1)), e = fl(b d), in two passes; the divisor is n without `unbiased`. Then v
//            becomes fl(fl(v / b) / b)
//   var    = fl(fl(v / a) / a)
//   rstd   = fl(1 / fl(sqrt(fl(v + fl(fl(eps a) a)))))
//   y      = fl(d * rstd), or, without shift_mean, fl(fl(d * rstd) + mean); +0 where a token does not count
// So y is right for all finite x whose sum is finite, even where squares of x would overflow or underflow. A var too
// large for a float is +Inf. Where the sum overflows, mean and var are Inf or NaN, and y is NaN at every token that
// counts. If all values that count are equal, or a single token counts, mean is this value (+0 for -0), and var and
// every d are +0. If n = 0, mean and var are +0.
// Values of tokens that do not count are never used. Trailing padding changes no result, and padded and packed
// sequences have the same bits, at any stride and on every backend. A NaN at a token that counts makes y NaN at every
// token that counts. Every NaN output is the canonical NaN. The call enqueues its work on `stream`, which CPU backends
// ignore; it neither allocates nor synchronises. With bad offsets (docs/tokens.md) the CPU throws InvalidArgument
// before it writes anything; on a GPU every output is NaN.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

struct MaskedWhitenParams {
  Sequences sequences;
  TokenArray<const float> x;
  TokenMask mask;
  TokenArray<float> y;    // must not overlap x or the mask
  float* mean = nullptr;  // [], or null: not wanted
  float* var = nullptr;   // [], or null: not wanted
  float eps = 1e-8f;      // > 0
  bool shift_mean = true;
  bool unbiased = true;
  void* workspace = nullptr;  // masked_whiten_workspace_bytes(...), 8-byte aligned
};
std::int64_t masked_whiten_workspace_bytes(const MaskedWhitenParams& p, Device device);
void masked_whiten(const MaskedWhitenParams& p, Device device, Stream stream);

}  // namespace rlk
