// For every backend: where the queries and keys of a sequence lie, and which query sees which key. The places come from
// arrays of the call, such as cu_seqlens, and are clamped to the call's arrays.
#pragma once

#include <type_traits>

#include "kernels/attention/tree.h"
#include "rlk/ops/attention.h"

namespace rlk {

// Whether params of type Params may describe any kind of call. Code of the host uses such types.
template <class Params>
constexpr bool kMayBeAny =
    std::is_same_v<Params, AttentionInput> || std::is_same_v<Params, AttentionTree<AttentionInput>>;
// Whether the sequences of a call may share pages. The sequences of a backward call, or of a call with a tree, never
// share pages.
template <class Params>
constexpr bool kMayShare =
    kMayBeAny<Params> || std::is_same_v<Params, AttentionParams> || std::is_same_v<Params, AttentionPartialsParams>;

// Whether a call with Params may be a call for partials. Kernels of other Params need no test at run time.
template <class Params>
constexpr bool kMayBePartial = kMayBeAny<Params> || std::is_same_v<Params, AttentionPartialsParams>;

// The queries and keys of sequence b. Query i is token q_first + i of the array q. Key j is token k_first + j of the
// array k. In a tree, the keys of ancestors lie elsewhere.
struct AttentionSpan {
  std::int64_t sequence;
  std::int64_t q_first, num_queries;
  std::int64_t k_first, num_keys;
  std::int64_t window;  // largest number of keys that a query sees; larger than num_keys if there is no window
  // group: index of the group of sequences that share a prefix; prefix: number of keys in the prefix
  std::int64_t group = 0, prefix = 0;
  // range of keys in the splits that a call for partials computes, clamped to the arrays
  std::int64_t first_key = 0, last_key = INT64_MAX;
  bool causal;

  template <class Params>
  RLK_HD AttentionSpan(const Params& p, std::int64_t b) : sequence(b), causal(p.causal) {
    AttentionRange q = {0, p.q_tokens}, k = {0, p.k_tokens};
    if (p.cu_seqlens_q != nullptr) q = attention_place(p.cu_seqlens_q, b, p.q_tokens);
    if (p.cu_seqlens_k != nullptr) k = attention_place(p.cu_seqlens_k, b, p.k_tokens);
    if (p.leftpad_k != nullptr) k.first = clamp_to(in_memory(p.leftpad_k)[b], 0, k.last);
    if (kMayShare<Params> && p.group_offsets != nullptr) {
      const std::int64_t most = p.page_size * p.max_prefix_pages;
      group = sequence_of(p.group_offsets, p.num_groups, b);
      const bool shares = group < p.num_groups && in_memory(p.group_offsets)[group] <= b;
      if (shares) prefix = clamp_to(in_memory(p.prefix_lens)[group], 0, most);
      k.last += prefix - most;
    }
    q_first = q.first;
    k_first = k.first;
    num_queries = q.last - q.first;
    num_keys = k.last - k.first;
    if constexpr (kMayBranch<Params>) {
      if (p.parents != nullptr) {
        num_keys = AttentionPath(p, b).keys();
        k_first = q_first - position(0);
      }
    }
    if (p.seqused_q != nullptr) num_queries = clamp_to(in_memory(p.seqused_q)[b], 0, num_queries);
    const bool partial = kMayBePartial<Params> && p.num_splits > 0;
    if (partial) {
      first_key = attention_split_begin(p.first_split);
      last_key = attention_split_begin(p.first_split + p.num_splits);
      if (last_key > num_keys + p.absent_keys) last_key = num_keys + p.absent_keys;
      if (p.block_table == nullptr) k_first -= p.absent_keys;
    }
    if (p.seqused_k != nullptr) num_keys = clamp_to(in_memory(p.seqused_k)[b], 0, partial ? INT32_MAX : num_keys);
    window = p.window_size > 0 ? p.window_size : num_keys + num_queries + 1;
  }

  // The index, among the keys, of query i's own token.
  RLK_HD std::int64_t position(std::int64_t i) const { return num_keys - num_queries + i; }
  RLK_HD AttentionRange keys_of(std::int64_t i) const {
    if (!causal) return {0, num_keys};
    const std::int64_t n = position(i), first = n - window + 1;
    return {first > 0 ? first : 0, n + 1};  // n + 1 <= num_keys
  }
  RLK_HD AttentionRange queries_of(std::int64_t j) const {
    if (!causal) return {0, num_queries};
    const std::int64_t at = j - position(0);
    return {at > 0 ? at : 0, at + window < num_queries ? at + window : num_queries};
  }
  // The part of the range `keys` that lies in the splits that the call computes.
  RLK_HD AttentionRange here(AttentionRange keys) const {
    return {keys.first > first_key ? keys.first : first_key, keys.last < last_key ? keys.last : last_key};
  }
  // keys_of(queries) returns all keys that any of the queries sees. queries_of(keys) returns all queries that see any
  // of the keys.
  RLK_HD AttentionRange keys_of(AttentionRange queries) const {
    const AttentionRange a = keys_of(queries.first), b = keys_of(queries.last - 1);
    return {a.first, b.last};
  }
  RLK_HD AttentionRange queries_of(AttentionRange keys) const {
    const AttentionRange a = queries_of(keys.first), b = queries_of(keys.last - 1);
    return {a.first, b.last};
  }
};

// Element offset of a token of a sequence, for arrays without pages.
RLK_HD std::int64_t offset_of(const AttentionHeads& a, bool packed, std::int64_t sequence, std::int64_t token) {
  return (packed ? 0 : sequence * a.sequence_stride) + token * a.token_stride;
}

// The offset of a sequence's key j in k or in v. The offset is kNoPage if the key's page does not exist.
constexpr std::int64_t kNoPage = INT64_MIN;
template <class Params>
RLK_HD std::int64_t key_offset(const Params& p, const AttentionHeads& a, const AttentionSpan& span, std::int64_t j) {
  if constexpr (kMayBranch<Params>) {
    if (p.parents != nullptr) {
      const std::int64_t token = AttentionPath(p, span.sequence).token(p, j);
      return token < 0 ? kNoPage : token * a.token_stride;
    }
  }
  if (p.block_table == nullptr) return offset_of(a, p.cu_seqlens_k != nullptr, span.sequence, span.k_first + j);
  const bool shared = kMayShare<Params> && j < span.prefix;
  const std::int64_t row = shared ? span.group * p.prefix_stride : span.sequence * p.table_stride;
  std::int64_t number = shared || !kMayShare<Params> ? j : j - span.prefix;  // index of the key among the keys of its
                                                                             // page table
  if (kMayBePartial<Params>) number -= p.absent_keys;
  const std::int64_t page = in_memory(shared ? p.prefix_table : p.block_table)[row + number / p.page_size];
  if (page < 0 || page >= p.num_pages) return kNoPage;
  return page * a.sequence_stride + number % p.page_size * a.token_stride;
}

// The row of a token in out and lse: its index in q, counted over all sequences.
RLK_HD std::int64_t row_of(const AttentionInput& p, std::int64_t sequence, std::int64_t token) {
  return p.cu_seqlens_q != nullptr ? token : sequence * p.q_tokens + token;
}
RLK_HD std::int64_t lse_index(const AttentionInput& p, std::int64_t sequence, std::int64_t token, std::int64_t head) {
  return p.cu_seqlens_q != nullptr ? head * p.q_tokens + token : (sequence * p.num_q_heads + head) * p.q_tokens + token;
}
RLK_HD std::int64_t attention_rows(const AttentionInput& p) {
  return p.cu_seqlens_q != nullptr ? p.q_tokens : p.num_sequences * p.q_tokens;
}
inline std::int64_t attention_keys(const AttentionInput& p) {
  return p.cu_seqlens_k != nullptr ? p.k_tokens : p.num_sequences * p.k_tokens;
}

}  // namespace rlk
