// THE CONTRACT of masked_whiten: tokens that count to mean 0 and variance 1, over all sequences of a batch. Rules are those of
// docs/numerics.md. Written formulas are fp32 with the roundings shown, in the order shown.
//
//   sum(f) : of a sequence the perfect binary tree over its positions (math/tree_sum.h), +0 for tokens that do not count; of
//            the batch the tree over its sequences' sums.
//   n      = tokens that count;  mean = fl(sum(x) / n)
//   a, b   : powers of two, a <= 1 <= b, of the least and the largest x (math/moment_scale.h); 1 where all are equal
//   d      = fl(fl(a x) - fl(a mean))
//   v      = fl(sum(fl(e * e)) / (n - 1)), e = fl(b d): two passes; without `unbiased` / n. Then fl(fl(v / b) / b)
//   var    = fl(fl(v / a) / a)
//   rstd   = fl(1 / fl(sqrt(fl(v + fl(fl(eps a) a)))))
//   y      = fl(d * rstd), or, without shift_mean, fl(fl(d * rstd) + mean); +0 where a token does not count
// So y is right for all finite x whose sum is finite, whether or not their squares are in range. Too large a var is +Inf.
// Where the sum overflows, mean and var are Inf or NaN, and all y that count are NaN.
// Where all tokens that count are equal, one alone too, mean is what they are, -0 taken for +0, and var and every d are +0.
// n = 0: mean and var are +0.
// What tokens that do not count hold is never looked at. A row's trailing padding changes no bit, and packed is padded; the
// same bits at any stride and on every backend. A NaN that counts makes all that count NaN. NaN outputs are canonical.
// Neither allocates nor synchronises; enqueues on `stream`, which CPU backends ignore. Bad offsets
// (docs/tokens.md): InvalidArgument on the CPU before it writes anything; on a GPU all is NaN.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

struct MaskedWhitenParams {
  Sequences sequences;
  TokenArray<const float> x;
  TokenMask mask;
  TokenArray<float> y;    // memory apart from x and the mask
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
