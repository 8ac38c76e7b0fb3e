// THE CONTRACT of `optimal_token_baseline` (OTB): each token's return minus a baseline. The baseline at a position is a
// mean of the returns of the group's sequences at this position, weighted by the variance of their gradients. Rule
// numbers refer to docs/numerics.md. Formulas are in fp32, in the order shown, with one rounding per operation; exp
// comes from math/. rlk/tokens.h defines slots and sequences.
//
// A token t of a sequence counts where its mask is not zero; l = logprob, q = sum_p_sq, s = importance weight:
//   w = max((1 - 2 exp(l)) + q, +0); with importance weights, this w is multiplied by fl(s s).
//   G = sum of the rewards that count from t on. If one reward is given per sequence, G is this reward.
//   W = sum of w over the tokens that count, up to and including t.
//   n  = number of sequences in the group, those without a token included; N = number of a sequence's tokens that count
//   B = fl(num / fl(den + eps)), num = fma(G, W, num), den = fl(den + W), from +0, ascending by index over the group's
//       sequences that have a counting token at t. B is +0 where n = 1. With zero_tail: if one sequence's N is larger
//       than that of all others in its group, and M is the largest N of the other sequences, then B of this sequence is
//       +0 from position M on.
//   advantage = fl(G - B),  returns = G; both are +0 where a token does not count.
// Order of G and W. Chunks are 256 tokens, [256 k, 256 k + 256) of a sequence. A token that is missing or does not
// count is +0.
//   W: for h = 1, 2, 4, ..., 128: x_i becomes fl(x_i + x_{i-h}), for the whole chunk at once, with +0 before the chunk;
//      then W_i = fl(W at the end of the previous chunk + x_i), from +0
//   G: the same from last to first: x_i becomes fl(x_i + x_{i+h}); G_i = fl(G at the first token of the next chunk
//      + x_i)
// So trailing padding changes no result, and padded and packed sequences have the same bits. A group has the same bits
// at any place and stride, and on every backend. Values at tokens that do not count are never read. Every NaN output is
// the canonical NaN; a NaN affects its own group alone. Groups are given by offsets or by one size.
// The call enqueues its work on `stream`; it neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

struct OptimalTokenBaselineParams {
  Sequences sequences;
  PolicyTokens rewards;                 // [slots], or one value per sequence
  PolicyTokens logprob;                 // [slots]
  PolicyTokens sum_p_sq;                // [slots]
  PolicyTokens importance;              // [slots], or one value per sequence; or null
  TokenMask mask;                       // [slots]; null: every token counts
  const void* group_offsets = nullptr;  // [num_groups + 1], ascending from 0 to num_sequences; null: group_size
  DType group_dtype = DType::kInt64;    // kInt32, kInt64
  std::int64_t num_groups = 0;
  std::int64_t group_size = 0;  // used without offsets: num_groups * group_size = num_sequences
  float eps = 1e-8f;            // > 0
  std::int32_t zero_tail = 1;
  float* advantages = nullptr;  // [slots], contiguous; neither output may overlap the inputs
  float* returns = nullptr;     // [slots], contiguous
  void* workspace = nullptr;    // optimal_token_baseline_workspace_bytes(...), 16-byte aligned
};
std::int64_t optimal_token_baseline_workspace_bytes(const OptimalTokenBaselineParams& p, Device device);
// For offsets or group offsets that descend the CPU throws InvalidArgument. On a GPU the sequences next to such an
// offset have NaN outputs. Groups are limited to the sequences that exist, and no memory outside the arrays is touched.
// Slots outside every sequence or group are not written.
void optimal_token_baseline(const OptimalTokenBaselineParams& p, Device device, Stream stream);

}  // namespace rlk
