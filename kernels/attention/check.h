// Every backend checks these preconditions of an attention call, because a violation would corrupt memory. Users' input
// is checked earlier, by the bindings.
#pragma once

#include "kernels/attention/row.h"
#include "kernels/attention/span.h"
#include "rlk/ops/attention.h"

namespace rlk {

inline void check_attention_input(const AttentionInput& p) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "attention: q is float32, bfloat16 or float16");
  RLK_CHECK(p.num_sequences >= 0 && p.num_sequences < kMost - 1, "attention: fewer than 2^31 - 1 sequences");
  RLK_CHECK(p.q_tokens >= 0 && p.q_tokens < kMost, "attention: fewer than 2^31 queries");
  RLK_CHECK(p.k_tokens >= 0 && p.k_tokens < kMost, "attention: fewer than 2^31 keys");
  RLK_CHECK(p.num_kv_heads >= 1 && p.num_q_heads >= 0 && p.num_q_heads < std::int64_t{1} << 24 &&
                p.num_q_heads % p.num_kv_heads == 0,
            "attention: query heads are a multiple of key heads");
  RLK_CHECK(p.head_dim >= 8 && p.head_dim <= kMaxHeadDim && p.head_dim % 8 == 0,
            "attention: head_dim is a multiple of 8 in [8, 256]");
  RLK_CHECK(p.value_dim >= 8 && p.value_dim <= p.head_dim && p.value_dim % 8 == 0,
            "attention: value_dim is a multiple of 8 in [8, head_dim]");
  RLK_CHECK(p.window_size >= 0 && (p.window_size == 0 || p.causal), "attention: a window is causal");
  const float c = attention_scale(p.softmax_scale);
  RLK_CHECK(c >= 0x1p-126f && c < infinity(), "attention: log2e * softmax_scale is finite, positive and not subnormal");
  const float inner = p.softcap == 0.0f ? 1.0f : div_rn(p.softmax_scale, p.softcap);
  RLK_CHECK(p.softcap >= 0.0f && p.softcap < infinity() && inner >= 0x1p-126f && inner < infinity(),
            "attention: softcap is 0 or finite and positive, and softmax_scale / softcap is too, and not subnormal");
  RLK_CHECK(p.block_table == nullptr || (p.cu_seqlens_k == nullptr && p.leftpad_k == nullptr),
            "attention: pages have neither cu_seqlens_k nor leftpad_k");
  RLK_CHECK(p.cu_seqlens_k == nullptr || p.leftpad_k == nullptr, "attention: packed keys have no leftpad_k");
  if (p.block_table != nullptr) {
    RLK_CHECK(p.page_size >= 1 && p.max_pages >= 0 && p.num_pages >= 0 && p.max_prefix_pages >= 0 &&
                  p.k_tokens == p.page_size * (p.max_prefix_pages + p.max_pages),
              "attention: k_tokens is page_size * (max_prefix_pages + max_pages)");
  }
  const bool groups = p.group_offsets != nullptr;
  RLK_CHECK(groups == (p.prefix_table != nullptr) && groups == (p.prefix_lens != nullptr) &&
                (groups ? p.block_table != nullptr && p.num_groups >= 0 : p.max_prefix_pages == 0),
            "attention: a shared prefix has its table, its lengths and its groups, beside block_table");
  const bool other_lists =
      p.block_table != nullptr || p.seqused_q != nullptr || p.seqused_k != nullptr || p.leftpad_k != nullptr;
  RLK_CHECK(p.parents == nullptr || (p.cu_seqlens_q != nullptr && p.cu_seqlens_k == p.cu_seqlens_q && p.causal &&
                                     p.k_tokens == p.q_tokens && !other_lists),
            "attention: a tree is causal and packed, queries and keys alike, and has no other list");
}

inline void check_attention(const AttentionParams& p) {
  check_attention_input(p);
  if (p.num_sequences * p.q_tokens * p.num_q_heads == 0) return;
  RLK_CHECK(p.q.data && p.out, "attention: q and out are given");
  const bool no_keys = p.k_tokens == 0 || (p.block_table != nullptr && p.num_pages == 0);
  RLK_CHECK(no_keys || (p.k.data && p.v.data), "attention: k and v are given");
}

inline void check_attention(const AttentionPartialsParams& p) {
  check_attention_input(p);
  constexpr std::int64_t kMostSplits = attention_splits(INT32_MAX);
  RLK_CHECK(p.first_split >= 0 && p.num_splits >= 0 && p.first_split <= kMostSplits - p.num_splits,
            "attention_partials: splits have keys below 2^31");
  RLK_CHECK(p.absent_keys >= 0 && p.absent_keys % 1024 == 0 && p.absent_keys <= attention_split_begin(p.first_split),
            "attention_partials: absent_keys are those of whole splits in front of the first");
  RLK_CHECK(p.absent_keys == 0 || (p.seqused_k != nullptr && p.group_offsets == nullptr),
            "attention_partials: beside absent keys seqused_k is given, and pages are not shared");
  RLK_CHECK(p.sinks == nullptr && p.parents == nullptr, "attention_partials: no tree, and sinks are the merge's");
  if (attention_rows(p) * p.num_q_heads * p.num_splits == 0) return;
  RLK_CHECK(p.q.data && p.stats && p.sums, "attention_partials: q and both outputs are given");
  const bool no_keys = p.k_tokens == 0 || (p.block_table != nullptr && p.num_pages == 0);
  RLK_CHECK(no_keys || (p.k.data && p.v.data), "attention_partials: k and v are given");
}

inline void check_attention(const AttentionMergeParams& p) {
  RLK_CHECK(p.dtype == DType::kFloat32 || p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
            "attention_merge: out is float32, bfloat16 or float16");
  RLK_CHECK(p.num_splits >= 0 && p.num_splits <= kMaxMergedSplits, "attention_merge: at most 1024 splits");
  RLK_CHECK(p.value_dim >= 8 && p.value_dim <= kMaxHeadDim && p.value_dim % 8 == 0,
            "attention_merge: value_dim is a multiple of 8 in [8, 256]");
  RLK_CHECK(p.rows >= 0 && p.num_q_heads >= 0 && p.q_tokens >= 0 && (p.rows == 0 || p.rows % p.q_tokens == 0),
            "attention_merge: rows are those of sequences");
  const bool of_parts = p.outs != nullptr || p.lses != nullptr;
  RLK_CHECK(!of_parts || (p.stats == nullptr && p.sums == nullptr && p.sinks == nullptr),
            "attention_merge: partials, or parts without sinks");
  if (p.rows * p.num_q_heads == 0) return;
  RLK_CHECK(p.out, "attention_merge: out is given");
  RLK_CHECK(p.num_splits == 0 || (p.stats && p.sums) || (p.outs && p.lses), "attention_merge: what is merged is given");
}

inline void check_attention(const AttentionBackwardParams& p) {
  check_attention_input(p);
  RLK_CHECK(p.block_table == nullptr, "attention_backward: keys are not in pages");
  RLK_CHECK((p.dk == nullptr) == (p.dv == nullptr), "attention_backward: dk and dv are wanted together");
  RLK_CHECK(p.dsinks == nullptr || p.sinks != nullptr, "attention_backward: dsinks are those of sinks");
}

}  // namespace rlk
