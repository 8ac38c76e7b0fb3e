// THE CONTRACT of linear_logprob: selected log-probability of a language model's head, without its logits in memory.
// Rules are those of docs/numerics.md.
//
// The logits of row i are those of ops/linear.h, rounded once to logits_dtype (rule 8):
//   x[i, j] = round(fl(dot_k(hidden[i, k], weight[j, k]) + bias[j]))
// and everything that follows from them is ops/logprob.h's, of a row of these logits: statistics, lse, logprob, entropy,
// sum_p_sq, status, the stats form of a shard. So the outputs are bit for bit those of logprob(linear(hidden, weight)),
// whatever the number of rows, the shards of the vocabulary and the workspace.
// Rows with target == ignore_index take part in nothing: hidden[i] is not read, their outputs are 0.
//
// Backward: the logits are computed again, g[i, j] = dlogits of ops/logprob.h, rounded once to dtype (the operands').
//   dhidden[i, k] = round(dot_j(g[i, j], weight[j, k]))   over the columns of the vocabulary, ascending (rule 1)
//                   with dh_segments = 8 the dot product is ((d0 + d1) + (d2 + d3)) + ((d4 + d5) + (d6 + d7)), fp32
//                   additions (rule 2) of one for each of the vocabulary's eight parts (rule 5); of a shard, the subtree
//                   of its parts. A part without columns in memory is +0
//   dweight, dbias: those of ops/linear.h of dy = g and x = hidden: blocks of 8192 rows, main_grad (rule 9). Ignored rows
//                   are zero operands.
// Workspace and its size decide how much is computed at once, never a bit.
#pragma once

#include <cstdint>

#include "rlk/ops/linear.h"
#include "rlk/ops/logprob.h"

namespace rlk {

// The head: what makes logits of hidden states. LogprobInput::logits is null, its dtype is that of the logits.
struct Head {
  const void* hidden = nullptr;  // [num_rows, in_features], dtype
  const void* weight = nullptr;  // [num_columns, in_features], dtype
  const void* bias = nullptr;    // [num_columns], bias_dtype, or null
  RowLayout hidden_rows;
  std::int64_t weight_stride = 0;  // elements between rows
  std::int64_t in_features = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16; kFloat32 on the CPU. Logits are of this type or kFloat32
  DType bias_dtype = DType::kBFloat16;
  Arithmetic arithmetic = Arithmetic::kIeee;
};

// Outputs, target, temperature and kept sets as in ops/logprob.h; the target has one stride.
struct LinearLogprobParams : LogprobParams {  // workspace: of workspace_bytes, from a multiple of 256 bytes on
  Head head;
  std::int64_t workspace_bytes = 0;
};
void require_linear_logprob_backend(Device device);  // throws Unsupported where this build has none for the device

// Bytes of workspace: with fewer than `least` a call is refused, with more than `most` it is no faster.
struct WorkspaceRange {
  std::int64_t least = 0, most = 0;
};
WorkspaceRange linear_logprob_workspace(const LinearLogprobParams& p, Device device);
void linear_logprob(const LinearLogprobParams& p, Device device, Stream stream);

struct LinearLogprobBackwardParams : LogprobBackwardParams {  // dlogits is null; gradients of rows have one stride
  Head head;
  void* dhidden = nullptr;           // [num_rows, in_features], dtype; null: not wanted
  void* dweight = nullptr;           // [num_columns, in_features], dweight_dtype; null: not wanted
  void* dbias = nullptr;             // [num_columns], dbias_dtype; null: not wanted
  const float* main_grad = nullptr;  // [num_columns, in_features], or null; may be dweight itself
  RowLayout dhidden_rows;            // of one stride
  std::int64_t dweight_stride = 0, main_grad_stride = 0;
  DType dweight_dtype = DType::kFloat32, dbias_dtype = DType::kFloat32;  // kFloat32 or dtype
  bool wide_dhidden = false;  // dhidden is float32 and not rounded: a shard's share of a sum over ranks
  int dh_segments = 1;        // 1 or 8. With 8 dhidden is contiguous and a shard whole parts
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};
WorkspaceRange linear_logprob_backward_workspace(const LinearLogprobBackwardParams& p, Device device);
void linear_logprob_backward(const LinearLogprobBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
