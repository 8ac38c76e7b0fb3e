// THE CONTRACT of `linear_logprob`: selected log-probabilities from hidden states and the weight of a language model's
// head, without all logits in memory. Rule numbers refer to docs/numerics.md.
//
// The logits of row i follow ops/linear.h, rounded once to logits_dtype (rule 8):
//   x[i, j] = round(fl(dot_k(hidden[i, k], weight[j, k]) + bias[j]))
// ops/logprob.h defines everything else for a row of these logits: statistics, lse, logprob, entropy, sum_p_sq, status,
// and the statistics of a shard. So the outputs equal, bit for bit, those of logprob(linear(hidden, weight)), for any
// number of rows, any shards of the vocabulary and any size of the workspace. With LoRA the weight is
// weight + lora_scale * lora_b lora_a, but this sum is never formed:
//   u[i, r] = round(fl(lora_scale * fl(dot_k(hidden[i, k], lora_a[r, k]))))      rule 1; one fp32 product; rounded
//             once, to dtype
//   x[i, j] = round(fl(dot_k(hidden[i, k], weight[j, k]) continued over r with u[i, r], lora_b[j, r]) + bias[j])
// One accumulator sums both products. It takes rule 1's steps over in_features, padded with +0 to whole steps of 16,
// then new steps of 16 over the rank of LoRA. So a row has the bits that `linear` gives for the concatenations [hidden,
// u] and [weight, lora_b], each operand padded in this way.
//   largest[i] = the lowest column id in [0, valid_vocab) whose x[i, j] is the largest, with +0 equal to -0.
//                ops/sample.h gives the same id for a greedy row with these logits. `largest` is -1 where this greedy
//                row has a nonzero status (a NaN, +Inf, only -Inf, |x| from about 1.4e6 on). Neither logit_scale nor
//                softcap nor temperature is applied, since they do not change the order.
// A row with target == ignore_index is left out of everything: hidden[i] is not read, and its outputs and dhidden[i]
// are 0, whatever weight holds. Its `largest` has no meaning.
//
// Backward computes the logits again. g[i, j] = dlogits of ops/logprob.h, rounded once to dtype, the type of the
// operands.
//   dhidden[i, k] = round(dot_j(g[i, j], weight[j, k]))   over the columns of the vocabulary, ascending (rule 1).
//                   With dh_segments = 8 the dot product is ((d0 + d1) + (d2 + d3)) + ((d4 + d5) + (d6 + d7)). These
//                   are fp32 additions (rule 2) of one dot product for each of the vocabulary's eight parts (rule 5).
//                   A shard takes the subtree of its parts. A part without columns in memory is +0
//   dweight, dbias: dw and db of ops/linear.h for dy = g and x = hidden, with blocks of 8192 rows and main_grad
//                   (rule 9). Ignored rows enter as zeros.
//   With LoRA: v[i, r] = round(fl(lora_scale * fl(dot_j(g[i, j], lora_b[j, r]))))      over the columns, ascending
//              dhidden[i, k] = round(dot_j(g[i, j], weight[j, k]) continued over r with v[i, r], lora_a[r, k])
//              dlora_b is the dweight of ops/linear.h for dy = g and x = u; dlora_a is that for dy = v and x = hidden.
//              With dh_segments = 8 each part of the vocabulary has its own v and its own continued sum, and the tree
//              adds these sums. dlora_a folds the parts that have columns, ascending, and each part's blocks of 8192
//              rows in turn. Each step is one fp32 addition, and the result is rounded at the end.
//              If the vocabulary is cut into shards, each shard's dlora_a is its share of a sum over the shards,
//              computed with its own v. With dh_segments = 1, dhidden is such a share, too.
// The size of the workspace decides how much is computed at once, but changes no result. Without main_grad, dweight may
// hold intermediate values until the call is done.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rlk/ops/linear.h"
#include "rlk/ops/logprob.h"

namespace rlk {

// The head of a language model, which makes logits from hidden states. LogprobInput::logits is null, and
// LogprobInput::dtype is the dtype of the logits.
struct Head {
  const void* hidden = nullptr;  // [num_rows, in_features], dtype
  const void* weight = nullptr;  // [num_columns, in_features], dtype
  const void* bias = nullptr;    // [num_columns], bias_dtype, or null
  RowLayout hidden_rows;
  std::int64_t weight_stride = 0;  // elements between rows
  std::int64_t in_features = 0;
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16; kFloat32 on the CPU. Logits have this dtype or kFloat32
  DType bias_dtype = DType::kBFloat16;
  Arithmetic arithmetic = Arithmetic::kIeee;
  const void* lora_a = nullptr;                       // [lora_rank, in_features], dtype
  const void* lora_b = nullptr;                       // [num_columns, lora_rank], dtype
  std::int64_t lora_a_stride = 0, lora_b_stride = 0;  // elements between rows
  std::int64_t lora_rank = 0;                         // 0: no LoRA
  float lora_scale = 1.0f;                            // finite
};

// Outputs, target, temperature and kept sets are as in ops/logprob.h; the target has one stride.
struct LinearLogprobParams : LogprobParams {  // workspace: workspace_bytes bytes, 256-byte aligned
  Head head;
  // [num_rows], or null: not wanted. `largest` needs the whole vocabulary, at most 2^19 columns, and no kept sets. The
  // logits are then in the workspace on every device, some rows at a time.
  std::int64_t* largest = nullptr;
  std::int64_t workspace_bytes = 0;
};

// Range of workspace bytes: a call with fewer than `least` is refused, and more than `most` makes it no faster. `more`
// is the number of bytes that usual_workspace adds to 256 MiB. In a backward these bytes hold float32 sums for more
// rows than one block of 8192. In a forward that stores rows of logits, `more` is 256 MiB.
struct WorkspaceRange {
  std::int64_t least = 0, most = 0, more = 0;
};
// Workspace bytes of a call whose caller names no limit: `more`, and 256 MiB for all other arrays. If the other arrays
// need nearly 256 MiB or more, they get a quarter more than their least size.
inline std::int64_t usual_workspace(const WorkspaceRange& range) {
  constexpr std::int64_t kUsual = 256 << 20;
  const std::int64_t others = range.least - range.more;
  return range.more + std::max(kUsual, others + others / 4);
}
WorkspaceRange linear_logprob_workspace(const LinearLogprobParams& p, Device device);
void linear_logprob(const LinearLogprobParams& p, Device device, Stream stream);

struct LinearLogprobBackwardParams : LogprobBackwardParams {  // dlogits is null; each row gradient has one stride
  Head head;
  void* dhidden = nullptr;           // [num_rows, in_features], dtype; null: not wanted
  void* dweight = nullptr;           // [num_columns, in_features], dweight_dtype; null: not wanted
  void* dbias = nullptr;             // [num_columns], dbias_dtype; null: not wanted
  const float* main_grad = nullptr;  // [num_columns, in_features], or null; may be dweight itself
  RowLayout dhidden_rows;            // one stride for all rows
  std::int64_t dweight_stride = 0, main_grad_stride = 0;
  DType dweight_dtype = DType::kFloat32, dbias_dtype = DType::kFloat32;  // kFloat32 or dtype
  bool wide_dhidden = false;  // dhidden is float32 and not rounded, as a shard's share of a sum over ranks
  int dh_segments = 1;        // 1 or 8. With 8, dhidden must be contiguous, and a shard must consist of whole parts
  void* dlora_a = nullptr;    // [lora_rank, in_features], contiguous, dtype; null: not wanted
  void* dlora_b = nullptr;    // [num_columns, lora_rank], contiguous, dtype; null: not wanted
  bool wide_dlora_a = false;  // dlora_a is float32 and not rounded
  bool adds_dlora_a = false;  // dlora_a is added, block by block, to the contents of its array
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};
WorkspaceRange linear_logprob_backward_workspace(const LinearLogprobBackwardParams& p, Device device);
void linear_logprob_backward(const LinearLogprobBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
