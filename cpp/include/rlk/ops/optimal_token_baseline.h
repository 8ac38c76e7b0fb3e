// THE CONTRACT of optimal_token_baseline: advantages of tokens against a baseline of each position of a group, which weighs
// returns by how much their gradients vary (OTB). Rules are those of docs/numerics.md. Written formulas are fp32, one rounding
// an operation, in the order shown; exp is that of math/. Sequences: rlk/tokens.h.
//
// A token t of a sequence counts where its mask is not zero; l = logprob, q = sum_p_sq, s = importance weight:
//   w = max((1 - 2 exp(l)) + q, +0), or with importance weights that times fl(s s)
//   G = the rewards that count from t on, or, where rewards are one a sequence, that reward: of its last token
//   W = the w that count up to t
//   n  = sequences of the group, those without a token too; N = tokens of a sequence that count
//   B = fl(num / fl(den + eps)), num = fma(G, W, num), den = fl(den + W) over the group's sequences that have a token that
//       counts at t, ascending by index, from +0; +0 where n = 1. With zero_tail, +0 from position M on of a sequence whose N is
//       larger than that of all others of its group, of which M is the largest
//   advantage = fl(G - B),  returns = G; both +0 where a token does not count
// Order of G and W. Chunks are 256 tokens, [256 k, 256 k + 256) of a sequence; what does not count or is missing is +0.
//   W: for h = 1, 2, 4, ..., 128: x_i becomes fl(x_i + x_{i-h}), all of a chunk at once, +0 before its first; then
//      W_i = fl(W behind the chunk before + x_i), from +0
//   G: the same from the last to the first: x_i becomes fl(x_i + x_{i+h}); G_i = fl(G of the first of the chunk after + x_i)
// So a row's trailing padding changes no bit, and packed is padded; a group has the same bits wherever it stands, at any
// stride, and on every backend. Values at tokens that do not count are never read. NaN outputs are canonical; a NaN is
// seen in its group alone. Groups are given by offsets or by one size.
// Enqueues on `stream`; neither allocates nor synchronises.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

struct OptimalTokenBaselineParams {
  Sequences sequences;
  PolicyTokens rewards;                 // [slots], or one a sequence
  PolicyTokens logprob;                 // [slots]
  PolicyTokens sum_p_sq;                // [slots]
  PolicyTokens importance;              // [slots], or one a sequence; or null
  TokenMask mask;                       // [slots]; null: every token counts
  const void* group_offsets = nullptr;  // [num_groups + 1], ascending from 0 to num_sequences; null: group_size
  DType group_dtype = DType::kInt64;    // kInt32, kInt64
  std::int64_t num_groups = 0;
  std::int64_t group_size = 0;  // without offsets: num_groups * group_size = num_sequences
  float eps = 1e-8f;            // > 0
  std::int32_t zero_tail = 1;
  float* advantages = nullptr;  // [slots], contiguous; these two: memory apart from the inputs
  float* returns = nullptr;     // [slots], contiguous
  void* workspace = nullptr;    // optimal_token_baseline_workspace_bytes(...), 16-byte aligned
};
std::int64_t optimal_token_baseline_workspace_bytes(const OptimalTokenBaselineParams& p, Device device);
// Offsets and cuts that do not ascend are an InvalidArgument on the CPU. On a GPU the sequences beside such cuts have NaN,
// groups are cut short, no memory outside is touched, and what no group or no sequence has is not written.
void optimal_token_baseline(const OptimalTokenBaselineParams& p, Device device, Stream stream);

}  // namespace rlk
