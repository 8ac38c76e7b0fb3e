// THE CONTRACT of `linear_sample`: draws a token for each row of hidden states and gives its log-probability, without
// holding all logits of a language model's head in memory. Rule numbers refer to docs/numerics.md.
//
// The logits of row i are y of ops/linear.h, rounded once to out_dtype, in the product's arithmetic. ops/sample.h
// defines everything else for rows of these logits. So ids, log-probabilities and status equal, bit for bit, those of
// sample(linear(x, weight, bias)), for any number of rows and any size of the workspace. A row whose top_k exceeds
// kLinearSampleTopK has the status kBadParameter. There is no top_p, so `order` has no effect: min_p and top_k each
// keep the first columns of the same ranking.
//
// The call computes the logits of some rows in the workspace, as many as it has room for, then draws these rows'
// tokens, and goes on to the next rows. A fused kernel for few rows stores no logits, and its calls need no memory for
// them. The size of the workspace decides how many rows are computed at once, but changes no result.
// The call enqueues its work on `stream`; it neither allocates nor synchronises. The operator runs on every device on
// which `linear` and `sample` run.
#pragma once

#include <cstdint>

#include "rlk/ops/linear.h"
#include "rlk/ops/linear_logprob.h"
#include "rlk/ops/sample.h"

namespace rlk {

constexpr std::int64_t kLinearSampleTopK = 64;

struct LinearSampleParams {
  // The product that makes the logits: x [num_rows, in_features] with one stride, weight, bias, arithmetic. y, its
  // layout and start are null; k_segments is 1; out_features is in [1, kSampleVocab].
  LinearParams product;
  // The draw: temperature, min_p, top_k, greedy, the keys (seed, sample_id, position), random_stream, exp, valid_vocab;
  // ids, status, logprob and raw_logprob. `product` gives the logits, their sizes and dtype, and the workspace. All
  // other fields are unset.
  SampleParams draw;
  void* workspace = nullptr;  // workspace_bytes bytes, 256-byte aligned
  std::int64_t workspace_bytes = 0;
};

WorkspaceRange linear_sample_workspace(const LinearSampleParams& p, Device device);
void linear_sample(const LinearSampleParams& p, Device device, Stream stream);

}  // namespace rlk
