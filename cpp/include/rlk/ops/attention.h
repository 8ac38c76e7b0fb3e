// THE CONTRACT of attention: softmax(scale * q k^T) v with causal and window masks, over padded, packed and paged
// sequences, and its gradients. Rules are those of docs/numerics.md. Written formulas are fp32 with the roundings shown,
// in the order shown. `round` is to dtype, nearest even; of float32 it is nothing.
//
// Sequence b has Q queries and L keys: those of its place in q and k that are in use (kernels/attention_span.h).
//   q: batched [B, q_tokens, Hq, D], or packed [q_tokens, Hq, D] with cu_seqlens_q; seqused_q counts the first ones
//   k: batched [B, k_tokens, Hkv, D], packed [k_tokens, Hkv, D] with cu_seqlens_k, or pages [num_pages, page_size, Hkv, D]
//      of which block_table[b] lists those of b; leftpad_k keys are passed over, seqused_k counts the ones that follow
// Pages may be shared, forward: sequences [group_offsets[g], group_offsets[g + 1]) are group g. Their keys below
//   P = prefix_lens[g] lie in the pages of prefix_table[g], key P and those behind it in the pages of block_table[b], which
//   begin with key P wherever P ends in a page. A sequence of no group has P = 0. seqused_k counts from key 0 in any case.
// Under `parents` sequences are segments of trees, and q, k and v are packed by the same offsets. parents[s] < s is the
//   segment that s goes on from, -1 of a root. The queries of segment s are its own tokens. Its keys are those of its path:
//   of the root, of each segment below it, and its own ones, in this order, so that a token's number n is its depth.
// Keys are numbered from 0, the first in use. Query i stands at n = L - Q + i, and sees key j where
//   j <= n under `causal`, and n - window_size < j under a window (which is causal).
// Query head h reads key head h / (Hq / Hkv). A query that sees no key, or is not in use, has out +0 and lse -Inf, and is
// not read. A key that a query does not see contributes nothing to its row, nor the query to the key's gradients; nor does
// a key whose score is -Inf. What is not in use (past seqused, left padding, tails of pages, tokens of other sequences)
// contributes nothing whatever it holds. A token in use that a row does not see may make that row, or its gradients, NaN where
// it holds NaN or Inf, since a matrix unit multiplies it by 0: rows of its own sequence alone.
// Blocks have attention_block(D) keys and splits end where attention_split_end says, both counted from key 0.
// f(e) = 2^e for an integer e of at least -126, else 0; a product with it is IEEE's, subnormal results stay.
// Forward, of one query and head, over the keys that it sees, ascending:
//   s_j = q . k_j : one chain of fma over d ascending from +0
//   c   = fl(log2e * softmax_scale)
//   Under a softcap, in their place: h_j = tanh(fl(s_j * fl(softmax_scale / softcap))) by math/tanh.h,
//     s_j = fl(softcap * h_j), c = log2e. A product q . k_j of -Inf is a score of -softcap.
//   In a split, after block b:
//     m_b, q_b = rule 4's m and q for c and the largest s_j of the split's blocks up to b (math/softmax_stats.h's
//       leaf_reference); a prefix that is its identity contributes nothing, one that fails makes the row NaN
//     when m rises, l_r and O_d of the blocks before are multiplied by f(m_before - m_b)
//     p_j = portable: stat_exp_portable(max(s_j, q_b), c, m_b); hardware: ex2(fma(s_j, c, -m_b))
//     l_r = l_r + the block's sum, eight chains r = j % 8, both of unrounded p_j. A chain's four keys of 32 consecutive ones
//       are a group, g = ((p + p) + p) + p ascending, a key that the row does not see +0. The block's sum of 128 keys is
//       (g0 + g1) + (g2 + g3), of 64 keys g0 + g1
//     O_d = fma(round(p_j), v_jd, O_d), one chain from +0
//   l of a split = ((0+1)+(2+3))+((4+5)+(6+7)) of its chains.
//   Under sinks, u = fl(log2e * sinks[h]) of the row's head is one more split, the last, without a value: m = ceil(u), O = 0,
//     l = portable: stat_exp_portable(u, 1, m); hardware: ex2(fl(u - m)). Where m <= -2^21 it contributes nothing; where
//     m >= 2^21, or the sink is NaN, the rows of the head that see keys fail.
//   Splits merge ascending, a the splits before, b the next one: m = max(m_a, m_b), O_d = fma(O_a, f(m_a - m),
//     fl(O_b * f(m_b - m))), l like O_d. A split that contributed nothing, or the first, changes nothing.
//   out_d = round(fl(O_d * fl(1 / l)) + 0)    lse = fl(ln2 * fl(m + log2 l))            natural log of sum_j exp(scale s_j)
//   A row that sees keys and whose root is the identity is NaN, as are one with a NaN score and one with m >= 2^21.
//
// Partials are what splits hold ahead of their merge. A call of them computes splits [first_split, first_split + num_splits)
//   of every row, and k and v may hold the keys of a caller's own splits alone, one after another: key j of these splits lies
//   where key j - absent_keys of a whole sequence does, in its place, in its pages. absent_keys is a multiple of 1024. L, which
//   seqused_k says, the numbers of keys and n stay those of the whole sequence. There are no sinks. A row leaves of a split:
//     no key there is seen: m = -Inf, l = 0, O = +0. None that is contributes: m = -Inf, l = 1, O = +0
//     it fails there: m = NaN, l = 0, O = +0. Else m, l and fl(O_d + 0) of the split
//   attention_merge folds partials ascending by split: those with m = -Inf change nothing, but a row sees keys where any has
//   l = 1 or another m. Sinks, out and lse follow as above, so the bytes are those of one call.
//   Approximate, of normalised parts: a part is a split with u = fl(log2e * lse), m and l as of a sink's u, and O_d = fl(out_d *
//   l). It sees no key where lse = -Inf, and contributes nothing where m <= -2^21.
//
// bf16 and fp16 products on sm_90 follow rule 1 of the matrix units, forward and backward. There
//   s_j is one accumulator from +0 over steps of 16 columns d, the last one filled up with +0; dp_ij likewise
//   O_d goes on, in each block with a key that the row sees and a prefix that contributes, over steps of 16 keys counted
//     from the block's first:
//     p_j = +0 of a key that the row does not see or whose score is -Inf, v_jd = +0 of one that is not in use; a step
//     of such p may be left out where every v_jd is finite, since zeros do not align
//   The CPU reads the keys of such a block that are in use and in a page, and no other block's.
//   The chains of dq, dk and dv take steps of 16 keys, or queries, in place of links: ds and p of a pair that does not
//     see one another, or whose score is -Inf, are +0. dq's steps count from the block's first key.
// Backward, from dout and dlse (null means 0) and the saved out and lse:
//   delta = sum over d of dout * out: chains r = d % 8 of fma from +0, folded as l's; then with dlse fl(delta - dlse)
//   p_ij  = portable: 2^min(t, 127), 0 where t < -126; hardware: ex2(t), which is +Inf from t = 128 on;
//           t = fma(s_ij, c, -fl(lse_i * log2e)), by the mode's exponential as logprob's p
//   dp_ij = dout_i . v_j: one chain over d ascending from +0
//   ds_ij = round(fl(p_ij * fl(dp_ij - delta_i))), under a softcap
//           round(fl(fl(p_ij * fl(dp_ij - delta_i)) * fma(-h_ij, h_ij, 1)))
//   dq_i  = round(fl(softmax_scale * sum) + 0): in each block of keys one chain from +0 over its keys ascending of
//           fma(ds_ij, k_j); the blocks' chains are added in fp32 (IEEE, nearest even, subnormals kept) from +0, in
//           DESCENDING order of the block. A block of which the row sees no key adds +0, so it may be left out.
//   dk_j  = round(fl(softmax_scale * chain of fma(ds_ij, q_i)) + 0),  dv_j = round(chain of fma(round(p_ij), dout_i) + 0)
//           from +0 over the query heads of the key's ascending, of each its queries ascending, in steps of 16 that
//           floor(n / 16) counts, n the number of the key that stands where query i does; what a step lacks is zero
//   Under `parents` several segments may see a key. Each has such a chain of its own queries, and the chains are added in
//           fp32 (IEEE, nearest even, subnormals kept) from +0, segments ascending. One that does not see the key adds +0.
//   dsinks_h = fl(0 - sum over rows of p_ih * delta_i), p_ih the exponential above of t = fma(lse_i, -log2e, u_h), in the order
//           of rms_norm's dw: rows are places of q, [B, q_tokens] one after another, or packed; those that are not in use or
//           see no key are no links
//   Positions that are not in use, queries that see no key and keys that none sees get +0, and are not read.
// A query of a sequence has the same bits for any batch, packing, padding, paging and chunking: its keys, their numbers
// and n say all of them; so have the gradients of a key, which its queries say. With Exp::kPortable on every backend that
// has the same products.
// NaN results are canonical.
// Lists that contradict the arrays (an offset that descends or is out of range, a count below 0 or too large, a page that
// is none): the CPU throws InvalidArgument before it writes anything. A GPU reads nothing out of range and writes
// everything: offsets and counts are clamped, a token in no sequence is not in use, keys of a page that is none are NaN. A
// parent outside [-1, s) is a root of one key, which is NaN. Under `parents` the last offset is q_tokens.
// All functions enqueue on `stream`; they neither allocate nor synchronise. CPU backends ignore `stream`.
#pragma once

#include <cstdint>

#include "rlk/base.h"
#include "rlk/ops/linear.h"   // Arithmetic
#include "rlk/ops/logprob.h"  // Exp

namespace rlk {

constexpr int kAttentionChains = 8;  // chains of l, over keys, and of delta, over columns
constexpr int kAttentionGroup = 32;  // keys of a group: four for each chain of l
constexpr int kMaxHeadDim = 256;

// Keys of a block; head_dim is that of q and k.
RLK_HD constexpr int attention_block(std::int64_t head_dim) { return head_dim > 128 ? 64 : 128; }

// Splits have 1024 keys below key 8192, 2048 below 65536, then 4096: where split `number` begins, and how many splits the
// first `keys` keys touch. A split begins at a multiple of every block.
RLK_HD constexpr std::int64_t attention_split_begin(std::int64_t number) {
  return number < 8 ? 1024 * number : number < 36 ? 8192 + 2048 * (number - 8) : 65536 + 4096 * (number - 36);
}
RLK_HD constexpr std::int64_t attention_splits(std::int64_t keys) {
  return keys <= 8192    ? (keys + 1023) / 1024
         : keys <= 65536 ? 8 + (keys - 8192 + 2047) / 2048
                         : 36 + (keys - 65536 + 4095) / 4096;
}
// The end of the split that holds key `key`.
RLK_HD constexpr std::int64_t attention_split_end(std::int64_t key) {
  return attention_split_begin(attention_splits(key + 1));
}
// Whether a split begins at key `key`.
RLK_HD constexpr bool attention_split_begins(std::int64_t key) {
  return key == 0 || attention_split_end(key - 1) == key;
}

// Tokens of heads; columns are contiguous, any alignment. Strides in elements.
struct AttentionHeads {
  const void* data = nullptr;
  std::int64_t sequence_stride = 0;  // per sequence, or per page where keys lie in pages; packed: unused
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// What a sequence means: shared by forward and backward.
struct AttentionInput {
  AttentionHeads q, k, v;                      // dtype
  const std::int32_t* cu_seqlens_q = nullptr;  // [num_sequences + 1] from 0 to q_tokens: q is packed
  const std::int32_t* cu_seqlens_k = nullptr;  // [num_sequences + 1] from 0 to k_tokens: k and v are packed
  const std::int32_t* seqused_q = nullptr;     // [num_sequences] in [0, the sequence's place], or null: all
  const std::int32_t* seqused_k = nullptr;     // [num_sequences], behind leftpad_k, or null: all
  const std::int32_t* leftpad_k = nullptr;     // [num_sequences], k neither packed nor paged, or null: 0
  const std::int32_t* block_table = nullptr;   // [num_sequences, max_pages] of ids in [0, num_pages): k and v are pages
  std::int64_t table_stride = 0;               // elements between sequences
  std::int64_t num_pages = 0, page_size = 1, max_pages = 0;
  const std::int32_t* prefix_table = nullptr;   // [num_groups, max_prefix_pages] of ids, beside block_table: all three
  const std::int32_t* prefix_lens = nullptr;    // [num_groups] in [0, page_size * max_prefix_pages]
  const std::int32_t* group_offsets = nullptr;  // [num_groups + 1] from 0 on, at most num_sequences; or null: no groups
  std::int64_t prefix_stride = 0;               // elements between groups
  std::int64_t num_groups = 0, max_prefix_pages = 0;
  const std::int32_t* parents = nullptr;  // [num_sequences] in [-1, its index), or null: no trees. Beside cu_seqlens_q,
                                          // which cu_seqlens_k is too; causal, and no other list
  std::int64_t num_sequences = 0;
  std::int64_t q_tokens = 0;                       // places of each sequence; packed: of all
  std::int64_t k_tokens = 0;                       // the same; paged: page_size * (max_prefix_pages + max_pages)
  std::int64_t num_q_heads = 0, num_kv_heads = 1;  // the one a multiple of the other
  std::int64_t head_dim = 0;                       // a multiple of 8 in [8, kMaxHeadDim]
  std::int64_t window_size = 0;                    // 0: none; only causal
  float softmax_scale = 1.0f;                      // > 0; fl(log2e * softmax_scale) is finite and not subnormal
  const float* sinks = nullptr;    // [num_q_heads], in natural logarithms, after scale and softcap, or null
  float softcap = 0.0f;            // finite, > 0; fl(softmax_scale / softcap) likewise; 0: none
  DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16, kFloat32
  Exp exp = Exp::kPortable;
  bool causal = true;
  std::int64_t first_split = 0, num_splits = 0;  // splits that partials cover; 0: no partials
  std::int64_t absent_keys = 0;                  // in front of first_split; a multiple of 1024
  Arithmetic arithmetic = Arithmetic::kIeee;     // the CPU's; a GPU has its own
};

// Outputs are contiguous.
struct AttentionParams : AttentionInput {
  void* out = nullptr;        // [B, q_tokens, Hq, D] or [q_tokens, Hq, D], dtype
  float* lse = nullptr;       // [B, Hq, q_tokens] or [Hq, q_tokens]; null: not wanted
  void* workspace = nullptr;  // attention_workspace_bytes(...), 16-byte aligned
};

// seqused_k counts keys that k and v need not hold: a GPU does not clamp it, and keys behind the arrays are not seen. Beside
// absent_keys pages are not shared. Outputs are contiguous; every element is written.
struct AttentionPartialsParams : AttentionInput {
  float* stats = nullptr;  // [num_splits, B, q_tokens, Hq, 2] or [num_splits, q_tokens, Hq, 2]: m, l
  float* sums = nullptr;   // [num_splits, B, q_tokens, Hq, D] or [num_splits, q_tokens, Hq, D]: O
};

constexpr std::int64_t kMaxMergedSplits = 1024;

// Arrays are contiguous. Partials, or parts.
struct AttentionMergeParams {
  const float* stats = nullptr;  // [num_splits, rows, Hq, 2]
  const float* sums = nullptr;   // [num_splits, rows, Hq, D]
  const void* outs = nullptr;    // [num_splits, rows, Hq, D], dtype
  const float* lses = nullptr;   // [num_splits, B, Hq, q_tokens]
  const float* sinks = nullptr;  // [Hq], beside partials; or null
  void* out = nullptr;           // [rows, Hq, D], dtype
  float* lse = nullptr;          // [B, Hq, q_tokens]; null: not wanted
  std::int64_t num_splits = 0;   // in [0, kMaxMergedSplits]
  std::int64_t rows = 0;         // B * q_tokens
  std::int64_t q_tokens = 1;     // packed: all of them, and B is 1
  std::int64_t num_q_heads = 0, head_dim = 8;
  DType dtype = DType::kBFloat16;
  Exp exp = Exp::kPortable;                   // for sinks and for parts
  std::int16_t order[kMaxMergedSplits] = {};  // indices of splits, ascending by their numbers: each once
};

// Not of pages.
struct AttentionBackwardParams : AttentionInput {
  AttentionHeads out = {}, dout = {};  // shaped as q
  const float* lse = nullptr;          // as forward wrote it
  const float* dlse = nullptr;         // like lse, or null
  void* dq = nullptr;                  // shaped as q, contiguous; null: not wanted
  void* dk = nullptr;                  // shaped as k; dk and dv are wanted together
  void* dv = nullptr;
  float* dsinks = nullptr;    // [num_q_heads], beside sinks; null: not wanted
  void* workspace = nullptr;  // attention_backward_workspace_bytes(...), 16-byte aligned
};

// Bytes of device workspace that a forward needs on `device`; 0 on the CPU.
std::int64_t attention_workspace_bytes(const AttentionParams& p, Device device);
void attention(const AttentionParams& p, Device device, Stream stream);

void attention_partials(const AttentionPartialsParams& p, Device device, Stream stream);
void attention_merge(const AttentionMergeParams& p, Device device, Stream stream);

// Bytes of workspace that `p`, with its lists, needs on `device`, on the CPU too: at least 4 for each query and head.
std::int64_t attention_backward_workspace_bytes(const AttentionBackwardParams& p, Device device);
void attention_backward(const AttentionBackwardParams& p, Device device, Stream stream);

}  // namespace rlk
