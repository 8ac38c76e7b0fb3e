// THE CONTRACT of `sequence_logprob`: log-probabilities of tokens summed over each sequence, and its gradient. Rule
// numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and the order that they show.
//
// A token's position is its column in a padded array, or its distance from its sequence's first token in a packed
// array. Tokens whose mask is zero do not count; their log-probabilities may be anything, NaN and Inf included.
//   x[p]     = logprob at position p as fp32 where it counts, else +0
//   sum      = the perfect binary tree over x (math/tree_sum.h). All operators use this sum over a sequence's tokens.
//   count    = number of tokens that count, in 64 bits
// An empty or wholly masked sequence has sum +0 and count 0. A sum has the same bits padded and packed, for any number
// of sequences, at any position and stride, and on every backend. Padding to the right changes no sum.
// Sums of parts: if a sequence is cut at multiples of 2^k positions, the tree over the sums of its parts gives the sum
// of the whole sequence, bit for bit.
//   d_logprob = round(dsum[sequence]) where a token counts, +0 elsewhere; +0 for packed tokens outside every sequence.
// `round` rounds to dtype, to nearest even. Every NaN result is the canonical NaN.
// For invalid offsets (rlk/tokens.h) the CPU throws InvalidArgument before it writes anything. A GPU gives a sequence
// with invalid offsets the sum NaN, the count 0 and the status 1. It reads nothing of this sequence, and gives the
// sequence's tokens the gradient +0. Where offsets overlap, a token gets the gradient of one of the sequences that
// contain it.
// The call enqueues its work on `stream`; it neither allocates nor synchronises. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/tokens.h"

namespace rlk {

struct SequenceLogprobParams {
  const void* logprob = nullptr;    // [num_sequences, num_tokens] or packed [num_tokens], dtype; columns contiguous
  std::int64_t logprob_stride = 0;  // between rows, in elements; unused if packed
  TokenMask mask;                   // shaped as logprob
  Offsets cu_seqlens;
  float* sum = nullptr;            // [num_sequences]
  std::int64_t* count = nullptr;   // [num_sequences]
  std::int32_t* status = nullptr;  // [num_sequences] or null: 0, or 1 for invalid offsets
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;    // tokens per row; packed: tokens of all sequences
  DType dtype = DType::kFloat32;  // kFloat32, kBFloat16, kFloat16
};

struct SequenceLogprobBackwardParams {
  const float* dsum = nullptr;  // [num_sequences]
  std::int64_t dsum_stride = 1;
  TokenMask mask;
  Offsets cu_seqlens;
  void* d_logprob = nullptr;  // [num_sequences, num_tokens] or [num_tokens], dtype; contiguous
  std::int64_t num_sequences = 0;
  std::int64_t num_tokens = 0;
  DType dtype = DType::kFloat32;
};

void sequence_logprob(const SequenceLogprobParams& p, Device device, Stream stream);
void sequence_logprob_backward(const SequenceLogprobBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
