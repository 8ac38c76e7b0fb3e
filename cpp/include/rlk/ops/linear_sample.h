// THE CONTRACT of linear_sample: a token of each row of hidden states and its log-probability, without all logits of a
// language model's head in memory. Rules are those of docs/numerics.md.
//
// The logits of row i are y of ops/linear.h, rounded once to out_dtype, in the product's arithmetic. Everything that follows
// from them is ops/sample.h's, of rows of these logits. So ids, log-probabilities and status are bit for bit those of
// sample(linear(x, weight, bias)), whatever the number of rows and the workspace.
// top_k is at most kLinearSampleTopK, or the row has kBadParameter. There is no top_p, so `order` plays no part: min_p and
// top_k each keep a beginning of the same ranking.
//
// Some rows go together, as many as have their logits in the workspace: their product, then their draw. The workspace and
// its size decide how much is computed at once, never a bit.
// Enqueues on `stream`; neither allocates nor synchronises. It runs where linear and sample run.
#pragma once

#include <cstdint>

#include "rlk/ops/linear.h"
#include "rlk/ops/linear_logprob.h"
#include "rlk/ops/sample.h"

namespace rlk {

constexpr std::int64_t kLinearSampleTopK = 64;

struct LinearSampleParams {
  // What makes the logits: x [num_rows, in_features] of one stride, weight, bias, arithmetic. y, its layout and start are
  // null; k_segments is 1; out_features is in [1, kSampleVocab].
  LinearParams product;
  // How they are drawn from: temperature, min_p, top_k, greedy, the keys, random_stream, exp, valid_vocab; ids, status,
  // logprob and raw_logprob. Logits, their sizes and dtype and the workspace follow from `product`. All else is not there.
  SampleParams draw;
  void* workspace = nullptr;  // workspace_bytes bytes, from a multiple of 256 on
  std::int64_t workspace_bytes = 0;
};

WorkspaceRange linear_sample_workspace(const LinearSampleParams& p, Device device);
void linear_sample(const LinearSampleParams& p, Device device, Stream stream);

}  // namespace rlk
