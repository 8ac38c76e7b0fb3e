// THE CONTRACT of `attention`: softmax(scale * q k^T) v with causal and window masks, over padded, packed and paged
// sequences, and its gradients. Rule numbers refer to docs/numerics.md. Formulas are in fp32, with the roundings and
// the order that they show. `round` rounds to dtype, to nearest even; for float32 it changes nothing.
//
// Sequence b has Q queries and L keys. These are the tokens of sequence b that are in use in q and in k
//   (kernels/attention/span.h).
//   q: batched [B, q_tokens, Hq, D], or packed [q_tokens, Hq, D] with cu_seqlens_q. The first seqused_q tokens of a
//      sequence are in use.
//   k: batched [B, k_tokens, Hkv, D], packed [k_tokens, Hkv, D] with cu_seqlens_k, or pages
//      [num_pages, page_size, Hkv, D].
//      block_table[b] lists the pages of sequence b. The sequence skips its first leftpad_k keys; seqused_k counts the
//      keys in use after the skipped keys.
//   v has the layout of k, with value_dim columns in place of D = head_dim. out and dout have the layout of q, with
//      value_dim columns. The results have the bits of a call whose v and dout are padded with zero columns to D. Each
//      column of O is its own chain of fma, so a zero column does not affect other columns. Zero terms at the end of
//      the chains of dp and delta change at most the sign of a zero.
// In a forward call, the sequences of a group may share pages. Group g consists of sequences
//   [group_offsets[g], group_offsets[g + 1]). Let P = prefix_lens[g]. Keys below P lie in the pages of prefix_table[g];
//   key P and all later keys lie in the pages of block_table[b]. The first page of block_table[b] begins with key P,
//   even if P is not a multiple of page_size. A sequence outside every group has P = 0. seqused_k counts keys from key
//   0, in a group and outside every group.
// With `parents`, each sequence is a segment of a tree of tokens, and q, k and v are packed by the same offsets.
//   Segment s continues segment parents[s] < s, or is a root if parents[s] is -1. The queries of segment s are the
//   segment's tokens. The keys of segment s are the tokens on the path from the root to segment s: first the root's
//   tokens, then the tokens of each segment on the way down, and last the tokens of segment s. So the number n of a
//   query, defined next, is the depth of the query's token in the tree.
// The keys in use are numbered from 0. In this numbering, query i has the number n = L - Q + i. With `causal`, query i
//   sees key j if j <= n. With a window, which needs `causal`, key j must also satisfy n - window_size < j.
// Query head h reads key head h / (Hq / Hkv). A query that sees no key, or is not in use, is not read. Its out is +0
// and its lse is -Inf. A key that a query does not see contributes nothing to the query's row, and the query
// contributes nothing to the key's gradients. A key whose score is -Inf is treated in the same way. Tokens not in use
// (past seqused, left padding, tails of pages, tokens of other sequences) contribute nothing, whatever they hold. If a
// row does not see a token that is in use, a matrix unit multiplies the token's values by 0 for this row. So NaN or Inf
// in the token may make rows and gradients of the same sequence NaN, but not those of another sequence. The keys are
// cut into blocks of attention_block(D) keys, and into splits that end where attention_split_end says. Blocks and
// splits are counted from key 0.
// f(e) = 2^e for an integer e >= -126, else 0. A product with f(e) is the IEEE product and keeps subnormal results.
// Forward, for one query and head, over the keys that the query sees, ascending:
//   s_j = q . k_j : one chain of fma over d ascending from +0
//   c   = fl(log2e * softmax_scale)
//   A softcap replaces s_j and c: h_j = tanh(fl(s_j * fl(softmax_scale / softcap))) by math/tanh.h,
//     s_j = fl(softcap * h_j), c = log2e. A product q . k_j of -Inf then gives the score -softcap.
//   In a split, after block b:
//     m_b, q_b = rule 4's m and q for c and the largest s_j of the split's blocks up to b (leaf_reference() of
//       math/softmax_stats.h). If leaf_reference() gives identity_stats(), these blocks contribute nothing. If it gives
//       failed_stats(), the row is NaN.
//     When m rises, l_r and O_d of the earlier blocks are multiplied by f(m_before - m_b).
//     p_j = portable: stat_exp_portable(max(s_j, q_b), c, m_b); hardware: ex2(fma(s_j, c, -m_b)).
//     l_r = l_r + the block's sum for chain r. l has eight chains r, which sum unrounded p_j; key j is in chain
//       r = j % 8. Among 32 consecutive keys, a chain has four keys. These four give a group sum g = ((p + p) + p) + p,
//       keys ascending, where p is +0 for a key that the row does not see. The block's sum is (g0 + g1) + (g2 + g3) for
//       a block of 128 keys, and g0 + g1 for a block of 64 keys.
//     O_d = fma(round(p_j), v_jd, O_d), one chain from +0
//   l of a split = the sum of its chains in the order ((0+1)+(2+3))+((4+5)+(6+7)).
//   A sink is a score without a key and a value. With sinks, one more split follows the row's last split. With
//     u = fl(log2e * sinks[h]), its m = ceil(u), O = 0, l = portable: stat_exp_portable(u, 1, m);
//     hardware: ex2(fl(u - m)). If m <= -2^21 the sink contributes nothing. If m >= 2^21 or the sink is
//     NaN, the rows of head h that see keys are NaN.
//   Splits merge in ascending order. Let a be the merged earlier splits, and b the next split. Then m = max(m_a, m_b),
//     O_d = fma(O_a, f(m_a - m), fl(O_b * f(m_b - m))), and l by the same formula. The first split is taken unchanged.
//     A split that contributed nothing changes nothing.
//   out_d = round(fl(O_d * fl(1 / l)) + 0)    lse = fl(ln2 * fl(m + log2 l))    natural log of sum_j exp(scale s_j)
//   A row that sees keys is NaN if no split of the row contributes anything, if one of its scores is NaN, or if
//   m >= 2^21.
//
// Partials are the (m, l, O) of each split before the merge. A call for partials computes splits
//   [first_split, first_split + num_splits) of every row. k and v may leave out the keys of all other splits; the
//   remaining keys then follow one another. Key j of the sequence is then stored where key j - absent_keys would be
//   stored if no keys were left out. absent_keys is a multiple of 1024. L (given by seqused_k), the numbers of keys and
//   n still refer to the whole sequence. Sinks are not allowed. The partials of a split for a row are:
//     m = -Inf, l = 0, O = +0 if the row sees no key of the split;
//     m = -Inf, l = 1, O = +0 if the row sees keys of the split, but none contributes;
//     m = NaN, l = 0, O = +0 if the row fails in the split; otherwise m, l and fl(O_d + 0) of the split.
//   attention_merge merges partials in ascending order of the split. Partials with m = -Inf change nothing. A row
//   counts as seeing keys if any of its partials has l = 1 or an m other than -Inf. Sinks, out and lse then follow the
//   formulas of a forward call, so the bytes are those of one forward call. A partial's m must be -Inf, NaN or an
//   integer. A partial that the caller computed may have m >= 2^21; the row is then NaN, as in a forward call.
//   attention_merge also merges normalised parts, which have out and lse in place of partials; this merge is
//   approximate. With u = fl(log2e * lse), a part counts as a split with the m and l of a sink that has this u, and
//   O_d = fl(out_d * l). The part sees no key where lse = -Inf, and contributes nothing where
//   m <= -2^21.
//
// On sm_90, bf16 and fp16 products follow rule 1 of the matrix units, forward and backward:
//   s_j is one accumulator from +0 over steps of 16 columns d, the last step padded with +0. dp_ij is computed in the
//     same way.
//   O_d takes steps of 16 keys, counted from the block's first key. It takes the steps of each block in which the row
//     sees a key, provided that some key of the split up to the end of this block contributes. In a step,
//     p_j = +0 for a key that the row does not see or whose score is -Inf, v_jd = +0 for a key not in use. A step whose
//     p are all +0 may be left out if every v_jd is finite, since a zero product does not change where the unit cuts
//     its addends.
//   If a row sees a key of a block, the CPU reads the values of all keys of the block that are in use and in a page. It
//   reads nothing of any other block.
//   The chains of dq, dk and dv take steps of 16 keys or queries in place of one fma at a time. ds_ij and p_ij are +0
//     if query i does not see key j or the score is -Inf. The steps of dq are counted from the block's first key.
// Backward, from dout and dlse (null means 0) and the saved out and lse:
//   delta = sum over d of dout * out: eight chains r = d % 8 of fma from +0, added in the order of l's chains. With
//           dlse, delta becomes fl(delta - dlse)
//   p_ij  = portable: 2^min(t, 127), 0 where t < -126; hardware: ex2(t), which is +Inf from t = 128 on;
//           t = fma(s_ij, c, -fl(lse_i * log2e)). The exponential is that of p_j in ops/logprob.h, in the mode `exp`
//   dp_ij = dout_i . v_j: one chain over d ascending from +0
//   ds_ij = round(fl(p_ij * fl(dp_ij - delta_i))), under a softcap
//           round(fl(fl(p_ij * fl(dp_ij - delta_i)) * fma(-h_ij, h_ij, 1)))
//   dq_i  = round(fl(softmax_scale * sum) + 0). Each block of keys has one chain from +0 of fma(ds_ij, k_j), keys
//           ascending. The sum adds the blocks' chains in fp32 (IEEE, nearest even, subnormals kept) from +0, in
//           DESCENDING order of the block. A block without a key that the row sees adds +0, so it may be left out.
//   dk_j  = round(fl(softmax_scale * chain of fma(ds_ij, q_i)) + 0),
//   dv_j  = round(chain of fma(round(p_ij), dout_i) + 0).
//           The chains of dk and dv begin at +0. They run over the query heads that read the key's head, ascending, and
//           within each head over the queries, ascending, in steps of 16. Query i belongs to step floor(n / 16), where
//           n is its number among the keys. Places of a step without a query are zero
//   With `parents`, several segments may see a key. Each of these segments has its own chains of dk and dv, over its
//           own queries. The chains are added in fp32 (IEEE, nearest even, subnormals kept) from +0, segments
//           ascending. A segment that does not see the key adds +0.
//   dsinks_h = fl(0 - sum over rows of p_ih * delta_i), where p_ih is the exponential of p_ij with
//           t = fma(lse_i, -log2e, u_h). The sum runs over the positions of q in the order of rms_norm's dw. Batched
//           positions [B, q_tokens] are numbered row after row. Rows that are not in use or see no key are skipped.
//   Gradients are +0 at positions not in use, for queries that see no key, and for keys that no query sees. Inputs at
//   these places are not read.
// The bits of a query's row depend only on its keys, the numbers of these keys, and n. They do not depend on batch,
// packing, padding, paging or chunking. The gradients of a key depend in the same way on the queries that see the key.
// With Exp::kPortable the bits are the same on every backend whose matrix products have the same arithmetic.
// Every NaN result is the canonical NaN.
// A list may contradict the arrays: by an offset that descends or is out of range, a count that is negative or too
// large, or a page id that does not exist. The CPU then throws InvalidArgument before it writes anything. A GPU reads
// nothing out of range and writes every output. It clamps offsets and counts, treats a token outside every sequence as
// not in use, and uses NaN for the keys of a page that does not exist. A parent outside [-1, s) makes the segment a
// root with one key, which is NaN. With `parents`, the last offset must be q_tokens.
// All functions enqueue their work on `stream`; they neither allocate nor synchronise. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/ops/linear.h"   // Arithmetic
#include "rlk/ops/logprob.h"  // Exp

namespace rlk {

constexpr int kAttentionChains = 8;  // chains of l (over keys) and of delta (over columns)
constexpr int kAttentionGroup = 32;  // keys per group: four for each chain of l
constexpr int kMaxHeadDim = 256;

// Number of keys in a block; head_dim is the head dim of q and k.
RLK_HD constexpr int attention_block(std::int64_t head_dim) { return head_dim > 128 ? 64 : 128; }

// First key of split `number`, and number of splits that the first `keys` keys touch. Splits have 1024 keys below key
// 8192, 2048 below key 65536, then 4096. Every split begins at a multiple of the block size.
RLK_HD constexpr std::int64_t attention_split_begin(std::int64_t number) {
  return number < 8 ? 1024 * number : number < 36 ? 8192 + 2048 * (number - 8) : 65536 + 4096 * (number - 36);
}
RLK_HD constexpr std::int64_t attention_splits(std::int64_t keys) {
  return keys <= 8192    ? (keys + 1023) / 1024
         : keys <= 65536 ? 8 + (keys - 8192 + 2047) / 2048
                         : 36 + (keys - 65536 + 4095) / 4096;
}
// The end (exclusive) of the split that holds key `key`.
RLK_HD constexpr std::int64_t attention_split_end(std::int64_t key) {
  return attention_split_begin(attention_splits(key + 1));
}
// Whether a split begins at key `key`.
RLK_HD constexpr bool attention_split_begins(std::int64_t key) {
  return key == 0 || attention_split_end(key - 1) == key;
}

// Tokens with heads. Columns are contiguous, with any alignment. Strides are in elements.
struct AttentionHeads {
  const void* data = nullptr;
  std::int64_t sequence_stride = 0;  // per sequence, or per page if keys lie in pages; unused if packed
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// Inputs of forward and backward: the arrays, and the lists that say how their tokens form sequences.
struct AttentionInput {
  AttentionHeads q, k, v;                      // dtype
  const std::int32_t* cu_seqlens_q = nullptr;  // [num_sequences + 1] from 0 to q_tokens, or null: q is not packed
  const std::int32_t* cu_seqlens_k = nullptr;  // [num_sequences + 1] from 0 to k_tokens, or null: k and v are not
                                               // packed
  const std::int32_t* seqused_q = nullptr;     // [num_sequences], at most the tokens that q has for the sequence, or
                                               // null: all
  const std::int32_t* seqused_k = nullptr;     // [num_sequences], counted after leftpad_k; null: all keys
  const std::int32_t* leftpad_k = nullptr;     // [num_sequences], for k neither packed nor paged, or null: 0
  const std::int32_t* block_table = nullptr;   // [num_sequences, max_pages] of ids in [0, num_pages), or null: k and v
                                               // are not paged
  std::int64_t table_stride = 0;               // elements between sequences
  std::int64_t num_pages = 0, page_size = 1, max_pages = 0;
  const std::int32_t* prefix_table = nullptr;   // [num_groups, max_prefix_pages] of page ids; needs block_table and the
                                                // next two fields
  const std::int32_t* prefix_lens = nullptr;    // [num_groups] in [0, page_size * max_prefix_pages]
  const std::int32_t* group_offsets = nullptr;  // [num_groups + 1] from 0, at most num_sequences; null: no groups
  std::int64_t prefix_stride = 0;               // elements between groups
  std::int64_t num_groups = 0, max_prefix_pages = 0;
  const std::int32_t* parents = nullptr;  // [num_sequences] in [-1, its index), or null: no trees. Trees need `causal`
                                          // and equal cu_seqlens_q and cu_seqlens_k, and allow no other list
  std::int64_t num_sequences = 0;
  std::int64_t q_tokens = 0;                       // tokens per sequence; packed: tokens of all sequences
  std::int64_t k_tokens = 0;                       // as q_tokens; paged: page_size * (max_prefix_pages + max_pages)
  std::int64_t num_q_heads = 0, num_kv_heads = 1;  // q heads are a multiple of kv heads
  std::int64_t head_dim = 0;                       // columns of q and k: a multiple of 8 in [8, kMaxHeadDim]
  std::int64_t value_dim = 0;                      // columns of v and out: a multiple of 8 in [8, head_dim]
  std::int64_t window_size = 0;                    // 0: no window; needs `causal`
  float softmax_scale = 1.0f;                      // > 0; fl(log2e * softmax_scale) is finite and not subnormal
  const float* sinks = nullptr;                    // [num_q_heads], natural-log units, after scale and softcap, or null
  float softcap = 0.0f;                            // finite and > 0, as is fl(softmax_scale / softcap); 0: none
  DType dtype = DType::kBFloat16;                  // kBFloat16, kFloat16, kFloat32
  Exp exp = Exp::kPortable;
  bool causal = true;
  std::int64_t first_split = 0, num_splits = 0;  // splits of a call for partials; 0: no partials
  std::int64_t absent_keys = 0;                  // number of keys before first_split; a multiple of 1024
  Arithmetic arithmetic = Arithmetic::kIeee;     // used on the CPU; a GPU computes in its own arithmetic
};

// The outputs are contiguous.
struct AttentionParams : AttentionInput {
  void* out = nullptr;        // [B, q_tokens, Hq, value_dim] or [q_tokens, Hq, value_dim], dtype
  float* lse = nullptr;       // [B, Hq, q_tokens] or [Hq, q_tokens], or null: not wanted
  void* workspace = nullptr;  // attention_workspace_bytes(...) bytes, 16-byte aligned
};

// seqused_k also counts keys that k and v do not hold. A GPU does not clamp seqused_k, but no row sees keys behind the
// end of k and v. Groups are not allowed if absent_keys is not 0. Outputs are contiguous. Every element is written.
struct AttentionPartialsParams : AttentionInput {
  float* stats = nullptr;  // [num_splits, B, q_tokens, Hq, 2] or [num_splits, q_tokens, Hq, 2]: m, l
  float* sums = nullptr;   // [num_splits, B, q_tokens, Hq, value_dim] or [num_splits, q_tokens, Hq, value_dim]: O
};

constexpr std::int64_t kMaxMergedSplits = 1024;

// The arrays are contiguous. The call merges either partials or normalised parts.
struct AttentionMergeParams {
  const float* stats = nullptr;  // [num_splits, rows, Hq, 2]
  const float* sums = nullptr;   // [num_splits, rows, Hq, value_dim]
  const void* outs = nullptr;    // [num_splits, rows, Hq, value_dim], dtype: outputs of normalised parts
  const float* lses = nullptr;   // [num_splits, B, Hq, q_tokens]: lse of the parts in outs
  const float* sinks = nullptr;  // [Hq], for partials only; or null
  void* out = nullptr;           // [rows, Hq, value_dim], dtype
  float* lse = nullptr;          // [B, Hq, q_tokens], or null: not wanted
  std::int64_t num_splits = 0;   // in [0, kMaxMergedSplits]
  std::int64_t rows = 0;         // B * q_tokens; packed: q_tokens
  std::int64_t q_tokens = 1;     // packed: tokens of all sequences, with B = 1
  std::int64_t num_q_heads = 0, value_dim = 8;
  DType dtype = DType::kBFloat16;
  Exp exp = Exp::kPortable;                   // exponential of sinks and of parts
  std::int16_t order[kMaxMergedSplits] = {};  // the splits' indices in the arrays, each once, by ascending number
};

// k and v must not be paged.
struct AttentionBackwardParams : AttentionInput {
  AttentionHeads out = {}, dout = {};  // shaped as forward's out
  const float* lse = nullptr;          // the lse that forward wrote
  const float* dlse = nullptr;         // like lse, or null
  void* dq = nullptr;                  // shaped as q, contiguous, or null: not wanted
  void* dk = nullptr;                  // shaped as k; dk and dv are wanted together
  void* dv = nullptr;                  // shaped as v
  float* dsinks = nullptr;             // [num_q_heads], with sinks; null: not wanted
  void* workspace = nullptr;           // attention_backward_workspace_bytes(...), 16-byte aligned
};

// Bytes of device workspace that a forward needs on `device`; 0 on the CPU.
std::int64_t attention_workspace_bytes(const AttentionParams& p, Device device);
void attention(const AttentionParams& p, Device device, Stream stream);

void attention_partials(const AttentionPartialsParams& p, Device device, Stream stream);
void attention_merge(const AttentionMergeParams& p, Device device, Stream stream);

// Bytes of workspace that `p`, with its lists, needs on `device`: at least 4 for each query and head. The CPU needs a
// workspace, too.
std::int64_t attention_backward_workspace_bytes(const AttentionBackwardParams& p, Device device);
void attention_backward(const AttentionBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
