#include "attention_tiles.h"

#include <algorithm>
#include <string>

#include "kernels/attention/row.h"
#include "rlk/tokens.h"

namespace rlk::cpu {
namespace {

[[noreturn]] void bad(const char* name, const std::string& expected, std::int64_t got, const std::string& where) {
  throw InvalidArgument(std::string(name) + ": expected " + expected + ", got " + std::to_string(got) + where);
}

void check_count(const char* name, const std::int32_t* counts, std::int64_t b, std::int64_t most,
                 const char* what = "sequence") {
  if (counts == nullptr || (counts[b] >= 0 && counts[b] <= most)) return;
  bad(name, "numbers in [0, " + std::to_string(most) + "]", counts[b],
      std::string(" for ") + what + " " + std::to_string(b));
}

// Checks the page ids of `keys`. Keys are numbered from the first key of the table's row.
void check_pages(const AttentionInput& p, const char* name, const std::int32_t* table, std::int64_t stride,
                 std::int64_t row, AttentionRange keys) {
  if (keys.empty()) return;
  for (std::int64_t i = keys.first / p.page_size; i <= (keys.last - 1) / p.page_size; ++i) {
    const std::int64_t page = table[row * stride + i];
    if (page >= 0 && page < p.num_pages) continue;
    bad(name, "pages in [0, " + std::to_string(p.num_pages) + ")", page,
        " at [" + std::to_string(row) + ", " + std::to_string(i) + "]");
  }
}

// A call of attention_partials computes some splits of a sequence's keys. Checks that k is long enough to hold the keys
// of these splits. `place` covers all tokens in the arrays.
void check_keys_of_splits(const AttentionInput& p, const AttentionSpan& span, const AttentionSpan& place) {
  check_count("seqused_k", p.seqused_k, span.sequence, INT32_MAX);
  const std::int64_t last = std::min(span.num_keys, attention_split_begin(p.first_split + p.num_splits));
  if (last <= attention_split_begin(p.first_split) || last - p.absent_keys <= place.num_keys) return;
  bad("seqused_k",
      "numbers whose keys of splits up to " + std::to_string(p.first_split + p.num_splits - 1) + " fit the " +
          std::to_string(place.num_keys) + " places of k",
      span.num_keys, " for sequence " + std::to_string(span.sequence));
}

}  // namespace

AttentionScores scores_of(const AttentionInput& p) {
  const AttentionSoftcap softcap(p);
  return {attention_scale(p), softcap.cap, softcap.inner};
}

const AttentionLanes& attention_simd() { return RLK_CPU_LANES_IN_USE(attention_simd); }

void check_attention_lists(const AttentionInput& p) {
  if (p.parents != nullptr) {
    check_offset_values({p.cu_seqlens_q, DType::kInt32}, p.num_sequences, p.q_tokens, "cu_segments",
                        "the number of tokens", true);
    for (std::int64_t s = 0; s < p.num_sequences; ++s) {
      if (p.parents[s] < -1 || p.parents[s] >= s) {
        bad("parents", "-1 or a segment before its child", p.parents[s], " at index " + std::to_string(s));
      }
    }
    return;
  }
  check_offset_values({p.cu_seqlens_q, DType::kInt32}, p.num_sequences, p.q_tokens, "cu_seqlens_q");
  check_offset_values({p.cu_seqlens_k, DType::kInt32}, p.num_sequences, p.k_tokens, "cu_seqlens_k");
  check_offset_values({p.group_offsets, DType::kInt32}, p.num_groups, p.num_sequences, "group_offsets",
                      "the number of sequences");
  for (std::int64_t g = 0; g < p.num_groups; ++g) {
    check_count("prefix_lens", p.prefix_lens, g, p.page_size * p.max_prefix_pages, "group");
  }
  AttentionInput places = p;  // the sequences' places, before seqused shortens them
  places.seqused_q = places.seqused_k = nullptr;
  for (std::int64_t b = 0; b < p.num_sequences; ++b) {
    check_count("leftpad_k", p.leftpad_k, b, p.k_tokens);
    const AttentionSpan place(places, b);
    check_count("seqused_q", p.seqused_q, b, place.num_queries);
    const AttentionSpan span(p, b);
    if (p.num_splits > 0) {
      check_keys_of_splits(p, span, place);
    } else {
      check_count("seqused_k", p.seqused_k, b, place.num_keys);
    }
    if (p.block_table == nullptr || span.num_queries == 0) continue;
    AttentionRange keys = span.here(span.keys_of(AttentionRange{0, span.num_queries}));
    keys = {keys.first - p.absent_keys, keys.last - p.absent_keys};
    check_pages(p, "prefix_table", p.prefix_table, p.prefix_stride, span.group,
                {keys.first, std::min(keys.last, span.prefix)});
    check_pages(p, "block_table", p.block_table, p.table_stride, b,
                {std::max(keys.first, span.prefix) - span.prefix, keys.last - span.prefix});
  }
}

namespace {

// A single thread, in place of the block of GPU threads that kernels/attention/tree.h requires.
struct Alone {
  static int thread() { return 0; }
  static int threads() { return 1; }
  static void barrier() {}
};

}  // namespace

AttentionCall::AttentionCall(const AttentionInput& p) : params_{p} {
  if (p.parents == nullptr) return;
  paths_.resize(static_cast<std::size_t>(attention_path_words(p.num_sequences)));
  make_attention_paths<Alone>(p, paths_.data());
  params_.paths = paths_.data();
}

AttentionTasks::Task AttentionTasks::operator[](std::int64_t i) const {
  const auto found = std::upper_bound(ends_.begin(), ends_.end(), i);
  const std::int64_t begin = found == ends_.begin() ? 0 : *(found - 1);
  return {found - ends_.begin(), (i - begin) % heads_, (i - begin) / heads_ * piece_};
}

void AttentionReader::query(const AttentionHeads& a, std::int64_t dim, const AttentionSpan& span, std::int64_t i,
                            std::int64_t head, float* to) const {
  const std::int64_t at = offset_of(a, p_.cu_seqlens_q != nullptr, span.sequence, span.q_first + i);
  attention_simd().load(static_cast<const unsigned char*>(a.data) + (at + head * a.head_stride) * size_of(p_.dtype),
                        p_.dtype, dim, padded_columns(dim), to);
}
std::int64_t AttentionReader::offset_of_key(const AttentionHeads& a, const AttentionSpan& span, std::int64_t j) {
  if (p_.parents == nullptr) return key_offset(p_, a, span, j);
  const std::int64_t block = j / kTileKeys;
  if (span.sequence != segment_ || block != block_) {
    segment_ = span.sequence;
    block_ = block;
    tokens_.resize(kTileKeys);
    AttentionPath path(p_, segment_);
    for (std::int64_t i = std::min((block + 1) * kTileKeys, span.num_keys) - 1; i >= block * kTileKeys; --i) {
      tokens_[i % kTileKeys] = path.token(p_, i);
    }
  }
  const std::int64_t token = tokens_[j % kTileKeys];
  return token < 0 ? kNoPage : token * a.token_stride;
}
void AttentionReader::key(const AttentionHeads& a, std::int64_t dim, const AttentionSpan& span, std::int64_t j,
                          std::int64_t kv_head, float* to) {
  const std::int64_t at = offset_of_key(a, span, j);
  attention_simd().load(static_cast<const unsigned char*>(a.data) + (at + kv_head * a.head_stride) * size_of(p_.dtype),
                        p_.dtype, dim, padded_columns(dim), to);
}

}  // namespace rlk::cpu
