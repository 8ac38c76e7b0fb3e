// A call of attention with its memory. Sequences have any form, layout and alignment; elements not in use are NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "linear_backend.h"
#include "rlk/ops/attention.h"

namespace attention_test {

using linear_test::Data;
using rlk::AttentionBackwardParams;
using rlk::AttentionHeads;
using rlk::AttentionInput;
using rlk::AttentionParams;
using rlk::DType;
using rlk::Exp;

enum class Form { kPadded, kLeftPadded, kPacked, kPaged };
enum class Layout { kTokens, kHeadsFirst, kSlice };  // [T, H, D]; [H, T, D]; heads of a fused projection

struct Case {
  std::vector<std::pair<std::int64_t, std::int64_t>> lengths;           // numbers of queries and keys of each sequence
  std::int64_t q_heads = 2, kv_heads = 1, head_dim = 8, value_dim = 0;  // value_dim 0: head_dim
  DType dtype = DType::kBFloat16;
  Exp exp = Exp::kPortable;
  bool causal = true;
  std::int64_t window = 0;
  float scale = 0.25f;
  float softcap = 0.0f;
  bool sinks = false;
  Form q_form = Form::kPacked, k_form = Form::kPacked;
  Layout layout = Layout::kTokens;
  std::int64_t page_size = 16;
  std::vector<std::pair<std::int64_t, std::int64_t>> groups = {};  // if paged: (number of sequences, number of keys
                                                                   // that they share) of each group
  std::vector<std::int32_t> parents = {};  // for packed sequences that are segments of trees, each with as many queries
                                           // as keys
  std::size_t shift = 0;                   // bytes off any alignment
  Data data = Data::kNormal;
  float spread = 1.0f;  // factor of q; other data is normal
  float bias = 0.0f;    // added to normal elements of q, and subtracted from normal elements of k
  int peaks = 0;        // every `peaks`-th normal token of a head is near the type's largest number; 0: no token
  bool dlse = true;
  unsigned seed = 1;

  std::int64_t values() const { return value_dim == 0 ? head_dim : value_dim; }
  std::string text() const {
    std::string t = std::string(linear_test::name(dtype)) + " " + std::to_string(q_heads) + "/" +
                    std::to_string(kv_heads) + " heads of " + std::to_string(head_dim) + "/" +
                    std::to_string(values()) + ", lengths";
    for (const auto& [q, k] : lengths) t += std::string(" ") + std::to_string(q) + "/" + std::to_string(k);
    return t + (causal ? ", causal" : "") + (window ? ", window " + std::to_string(window) : "") +
           (groups.empty() ? "" : ", " + std::to_string(groups.size()) + " groups") +
           (parents.empty() ? "" : ", tree") + (softcap > 0.0f ? ", softcap " + std::to_string(softcap) : "") +
           (sinks ? ", sinks" : "") + (exp == Exp::kHardware ? ", hardware" : "") + ", forms " +
           std::to_string(static_cast<int>(q_form)) + " " + std::to_string(static_cast<int>(k_form)) + ", layout " +
           std::to_string(static_cast<int>(layout)) + ", " + linear_test::name(data) + (peaks ? ", peaks" : "") +
           ", seed " + std::to_string(seed);
  }
};

class Problem {
 public:
  explicit Problem(const Case& c) : case_(c), random_(c.seed) {
    input.num_sequences = static_cast<std::int64_t>(c.lengths.size());
    input.num_q_heads = c.q_heads;
    input.num_kv_heads = c.kv_heads;
    input.head_dim = c.head_dim;
    input.value_dim = c.values();
    input.dtype = c.dtype;
    input.exp = c.exp;
    input.causal = c.causal;
    input.window_size = c.window;
    input.softmax_scale = c.scale;
    input.softcap = c.softcap;
    std::int64_t most_q = 0, most_k = 0;
    for (const auto& [q, k] : c.lengths) {
      most_q = std::max(most_q, q);
      most_k = std::max(most_k, k);
    }
    lay_out_queries(most_q + (c.q_form == Form::kPadded ? 2 : 0));
    lay_out_keys(most_k + 3);
    if (!c.parents.empty()) {
      input.parents = case_.parents.data();
      input.cu_seqlens_k = input.cu_seqlens_q;
    }
    // Sinks of four kinds: sinks that dominate a row, hardly count, contribute nothing, or make their rows NaN.
    constexpr float kSinks[] = {0.3f, -2.5f, 40.0f, -1e30f, 0.0f, 1e-30f, -INFINITY, -700.0f};
    for (std::int64_t h = 0; h < c.q_heads; ++h) sinks_.push_back(kSinks[(h + c.seed) % std::size(kSinks)]);
    if (c.data == Data::kSpecial && c.q_heads > 1) sinks_[1] = c.seed % 2 == 0 ? INFINITY : NAN;
    if (c.sinks) input.sinks = sinks_.data();
  }

  // [places, heads, head_dim] of q or of k, contiguous.
  std::int64_t q_places() const {
    return (input.cu_seqlens_q ? 1 : input.num_sequences) * input.q_tokens * input.num_q_heads;
  }
  std::int64_t k_places() const {
    return (input.cu_seqlens_k ? 1 : input.num_sequences) * input.k_tokens * input.num_kv_heads;
  }
  const Case& what() const { return case_; }
  const std::vector<std::vector<unsigned char>>& memories() const { return memories_; }

  // Random elements shaped as out, set where queries are in use.
  AttentionHeads like_out() { return queries_of(case_.values()); }

  AttentionInput input;

 private:
  static std::int64_t step(Layout layout, std::int64_t heads, std::int64_t tokens, std::int64_t d, AttentionHeads* a) {
    const std::int64_t gap = layout == Layout::kSlice ? heads + 2 : heads;
    a->token_stride = layout == Layout::kHeadsFirst ? d : gap * d;
    a->head_stride = layout == Layout::kHeadsFirst ? tokens * d : d;
    a->sequence_stride = gap * d * tokens;
    return gap * d * tokens;  // elements per sequence
  }

  void lay_out_queries(std::int64_t padded) {
    const Case& c = case_;
    cu_q_.assign(1, 0);
    for (const auto& [q, k] : c.lengths) {
      cu_q_.push_back(cu_q_.back() + static_cast<std::int32_t>(q));
      used_q_.push_back(static_cast<std::int32_t>(q));
    }
    const bool packed = c.q_form == Form::kPacked;
    input.q_tokens = packed ? cu_q_.back() : padded;
    if (packed) input.cu_seqlens_q = cu_q_.data();
    if (c.q_form == Form::kPadded) input.seqused_q = used_q_.data();
    input.q = queries_of(c.head_dim, c.bias);
  }
  AttentionHeads queries_of(std::int64_t columns, float bias = 0.0f) {
    const bool packed = case_.q_form == Form::kPacked;
    AttentionHeads a;
    const std::int64_t size = step(case_.layout, case_.q_heads, input.q_tokens, columns, &a);
    if (packed) a.sequence_stride = 0;
    a.data =
        fill(size * (packed ? 1 : input.num_sequences), columns, bias, [&](auto&& element) { each_query(a, element); });
    return a;
  }

  void lay_out_keys(std::int64_t padded) {
    const Case& c = case_;
    cu_k_.assign(1, 0);
    for (const auto& [q, k] : c.lengths) {
      cu_k_.push_back(cu_k_.back() + static_cast<std::int32_t>(k));
      used_k_.push_back(static_cast<std::int32_t>(k));
      left_k_.push_back(static_cast<std::int32_t>(padded - k));
    }
    if (c.k_form == Form::kPaged) {
      lay_out_pages(padded);
    } else if (c.k_form == Form::kPacked) {
      input.k_tokens = cu_k_.back();
      input.cu_seqlens_k = cu_k_.data();
    } else {
      input.k_tokens = padded;
      if (c.k_form == Form::kPadded) {
        input.seqused_k = used_k_.data();
      } else {
        input.leftpad_k = left_k_.data();
      }
    }
    input.k = keys_of(c.head_dim, -c.bias);
    input.v = keys_of(c.values());
  }
  AttentionHeads keys_of(std::int64_t columns, float bias = 0.0f) {
    const bool paged = case_.k_form == Form::kPaged, packed = case_.k_form == Form::kPacked;
    AttentionHeads a;
    const std::int64_t tokens = paged ? case_.page_size : input.k_tokens;
    const std::int64_t size = step(case_.layout, case_.kv_heads, tokens, columns, &a);
    if (packed) a.sequence_stride = 0;
    a.data = fill(size * (paged    ? input.num_pages
                          : packed ? 1
                                   : input.num_sequences),
                  columns, bias, [&](auto&& element) { each_key(a, element); });
    return a;
  }

  // Every table is one column wider than its size says.
  void lay_out_pages(std::int64_t padded) {
    const Case& c = case_;
    std::int64_t most_shared = 0;
    for (const auto& [sequences, keys] : c.groups) {
      for (std::int64_t i = 0; i < sequences; ++i) shared_k_.push_back(keys);
      groups_.push_back(groups_.back() + static_cast<std::int32_t>(sequences));
      lens_.push_back(static_cast<std::int32_t>(keys));
      most_shared = std::max(most_shared, keys);
    }
    shared_k_.resize(c.lengths.size(), 0);
    std::int64_t most_own = 0;
    for (std::size_t b = 0; b < c.lengths.size(); ++b) most_own = std::max(most_own, padded - shared_k_[b]);
    const auto pages_of = [&](std::int64_t keys) { return (keys + c.page_size - 1) / c.page_size; };
    const auto num_groups = static_cast<std::int64_t>(c.groups.size());
    input.page_size = c.page_size;
    input.max_pages = pages_of(most_own);
    input.max_prefix_pages = pages_of(most_shared);
    input.num_pages = input.num_sequences * input.max_pages + num_groups * input.max_prefix_pages + 1;
    input.k_tokens = input.page_size * (input.max_prefix_pages + input.max_pages);
    input.table_stride = input.max_pages + 1;
    input.prefix_stride = input.max_prefix_pages + 1;
    std::vector<std::int32_t> pages;
    for (std::int64_t i = 0; i < input.num_pages; ++i) pages.push_back(static_cast<std::int32_t>(i));
    std::shuffle(pages.begin(), pages.end(), random_);
    const auto list = [&](std::vector<std::int32_t>* table, std::int64_t keys, std::int64_t stride) {
      for (std::int64_t i = 0; i < stride; ++i) {
        const bool used = i * c.page_size < keys;
        table->push_back(used ? pages.back() : -7);
        if (used) pages.pop_back();
      }
    };
    for (std::size_t b = 0; b < c.lengths.size(); ++b) list(&table_, used_k_[b] - shared_k_[b], input.table_stride);
    for (const auto& [sequences, keys] : c.groups) list(&prefix_table_, keys, input.prefix_stride);
    if (table_.empty()) table_.push_back(0);
    input.block_table = table_.data();
    input.seqused_k = used_k_.data();
    if (c.groups.empty()) return;
    input.num_groups = num_groups;
    input.prefix_table = prefix_table_.data();
    input.prefix_lens = lens_.data();
    input.group_offsets = groups_.data();
  }

  // Calls element(offset, columns) for each token and head in use.
  template <class F>
  void each_query(const AttentionHeads& a, const F& element) const {
    for (std::int64_t b = 0; b < input.num_sequences; ++b) {
      for (std::int64_t i = 0; i < used_q_[b]; ++i) {
        const std::int64_t at = case_.q_form == Form::kPacked ? (cu_q_[b] + i) * a.token_stride
                                                              : b * a.sequence_stride + i * a.token_stride;
        for (std::int64_t h = 0; h < case_.q_heads; ++h) element(at + h * a.head_stride);
      }
    }
  }
  template <class F>
  void each_key(const AttentionHeads& a, const F& element) const {
    for (std::int64_t b = 0; b < input.num_sequences; ++b) {
      for (std::int64_t j = 0; j < used_k_[b]; ++j) {
        std::int64_t at = b * a.sequence_stride + j * a.token_stride;
        if (case_.k_form == Form::kPacked) at = (cu_k_[b] + j) * a.token_stride;
        if (case_.k_form == Form::kLeftPadded) at += left_k_[b] * a.token_stride;
        if (case_.k_form == Form::kPaged) {
          const std::int64_t shared = shared_k_[b], size = input.page_size, number = j < shared ? j : j - shared;
          const auto group = std::upper_bound(groups_.begin(), groups_.end(), b) - groups_.begin() - 1;
          const std::int32_t* row =
              j < shared ? &prefix_table_[group * input.prefix_stride] : &table_[b * input.table_stride];
          at = row[number / size] * a.sequence_stride + number % size * a.token_stride;
        }
        for (std::int64_t h = 0; h < case_.kv_heads; ++h) element(at + h * a.head_stride);
      }
    }
  }
  // Fills with NaN, except for the elements in use.
  template <class F>
  const void* fill(std::int64_t size, std::int64_t columns, float bias, const F& each) {
    const std::size_t bytes = static_cast<std::size_t>(rlk::size_of(case_.dtype));
    memories_.emplace_back(static_cast<std::size_t>(size) * bytes + case_.shift + 16, 0xff);
    unsigned char* data = memories_.back().data();
    data += (16 - reinterpret_cast<std::uintptr_t>(data) % 16) % 16 + case_.shift;
    // The buffers are 16-byte aligned, so the elements are where the lines above put them.
    each([&](std::int64_t at) {
      const bool is_peak = case_.peaks > 0 && ++tokens_ % case_.peaks == 0;
      const float factor = !is_peak ? case_.spread : case_.dtype == DType::kFloat16 ? 1e4f : 1e37f;
      for (std::int64_t d = 0; d < columns; ++d) {
        std::uint32_t pattern = linear_test::random_pattern(random_, case_.dtype, case_.data);
        if (case_.data == Data::kNormal) {
          pattern = linear_test::rounded(linear_test::value_of(pattern, case_.dtype) * factor + bias, case_.dtype);
        }
        std::memcpy(data + static_cast<std::size_t>(at + d) * bytes, &pattern, bytes);
      }
    });
    return data;
  }

  Case case_;
  std::mt19937 random_;
  int tokens_ = 0;  // tokens of a head, filled so far
  std::vector<std::int32_t> cu_q_, cu_k_, used_q_, used_k_, left_k_, table_, prefix_table_, lens_, groups_ = {0};
  std::vector<std::int64_t> shared_k_;  // shared keys per sequence
  std::vector<float> sinks_;
  std::vector<std::vector<unsigned char>> memories_;
};

}  // namespace attention_test
