// A second implementation of attention, slow and independent of the backends, written from the contract,
// ops/attention.h. The reference gives the bit patterns of every output. The reference shares only the formats and the
// functions of math/ with the backends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "linear_reference.h"
#include "logprob_reference.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/attention.h"

namespace attention_test {

using linear_test::load_pattern;
using linear_test::Patterns;
using linear_test::rounded;
using linear_test::value_of;
using logprob_test::bf16_toward_minus_infinity;
using logprob_test::chains_to_leaf;
using logprob_test::kInf;
using logprob_test::kNaN;
using logprob_test::times_power_of_two;
using rlk::AttentionBackwardParams;
using rlk::AttentionHeads;
using rlk::AttentionInput;
using rlk::AttentionParams;
using rlk::DType;
using rlk::Exp;

using Row = std::vector<float>;

// Sequence b of a call: its numbers of queries and keys, their places, and which query sees which key.
class Sequence {
 public:
  Sequence(const AttentionInput& p, std::int64_t b) : p_(p), b_(b) {
    queries = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.q_tokens;
    keys = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.k_tokens;
    if (p.parents) {
      keys = 0;
      go_down(b);
    }
    if (p.leftpad_k) keys -= p.leftpad_k[b];
    if (p.seqused_q) queries = p.seqused_q[b];
    if (p.seqused_k) keys = p.seqused_k[b];
    for (std::int64_t g = 0; g < p.num_groups; ++g) {
      if (b < p.group_offsets[g] || b >= p.group_offsets[g + 1]) continue;
      group_ = g;
      shared_ = p.prefix_lens[g];
    }
  }
  std::int64_t queries, keys;

  bool sees(std::int64_t i, std::int64_t j) const {
    const std::int64_t n = keys - queries + i;
    return !p_.causal || (j <= n && (p_.window_size == 0 || n - j < p_.window_size));
  }
  bool sees_any(std::int64_t i) const {
    for (std::int64_t j = 0; j < keys; ++j) {
      if (sees(i, j)) return true;
    }
    return false;
  }
  // Rows of `columns` columns: head_dim in q and k, value_dim in v, out and dout.
  Row query(const AttentionHeads& a, std::int64_t columns, std::int64_t i, std::int64_t head) const {
    const std::int64_t at =
        p_.cu_seqlens_q ? (p_.cu_seqlens_q[b_] + i) * a.token_stride : b_ * a.sequence_stride + i * a.token_stride;
    return row(a, columns, at + head * a.head_stride);
  }
  bool has_page(std::int64_t j) const {
    if (p_.parents) return path_[static_cast<std::size_t>(j)] >= 0;
    return !p_.block_table || (page(j) >= 0 && page(j) < p_.num_pages);
  }
  Row key(const AttentionHeads& a, std::int64_t columns, std::int64_t j, std::int64_t head) const {
    std::int64_t at;
    if (!has_page(j)) return Row(static_cast<std::size_t>(columns), kNaN);
    if (p_.parents) {
      at = path_[static_cast<std::size_t>(j)] * a.token_stride;
    } else if (p_.block_table) {
      at = page(j) * a.sequence_stride + (j < shared_ ? j : j - shared_) % p_.page_size * a.token_stride;
    } else if (p_.cu_seqlens_k) {
      at = (p_.cu_seqlens_k[b_] + j) * a.token_stride;
    } else {
      at = b_ * a.sequence_stride + ((p_.leftpad_k ? p_.leftpad_k[b_] : 0) + j) * a.token_stride;
    }
    return row(a, columns, at + head * a.head_stride);
  }
  // place: row index in out, dq and lse; key_place: row index in dk and dv.
  std::int64_t place(std::int64_t i) const { return p_.cu_seqlens_q ? p_.cu_seqlens_q[b_] + i : b_ * p_.q_tokens + i; }
  std::int64_t key_place(std::int64_t j) const {
    if (p_.parents) return path_[static_cast<std::size_t>(j)];
    if (p_.cu_seqlens_k) return p_.cu_seqlens_k[b_] + j;
    return b_ * p_.k_tokens + (p_.leftpad_k ? p_.leftpad_k[b_] : 0) + j;
  }
  std::int64_t lse_place(std::int64_t i, std::int64_t head) const {
    return p_.cu_seqlens_q ? head * p_.q_tokens + place(i) : (b_ * p_.num_q_heads + head) * p_.q_tokens + i;
  }

 private:
  // Collects the tokens of the path of segment s; -1 stands for an invalid parent.
  void go_down(std::int64_t s) {
    const std::int32_t parent = p_.parents[s];
    if (parent >= 0 && parent < s) {
      go_down(parent);
    } else if (parent != -1) {
      path_.push_back(-1);
    }
    for (std::int64_t t = p_.cu_seqlens_q[s]; t < p_.cu_seqlens_q[s + 1]; ++t) path_.push_back(t);
    keys = static_cast<std::int64_t>(path_.size());
  }
  std::int64_t page(std::int64_t j) const {
    if (j < shared_) return p_.prefix_table[group_ * p_.prefix_stride + j / p_.page_size];
    return p_.block_table[b_ * p_.table_stride + (j - shared_) / p_.page_size];
  }
  Row row(const AttentionHeads& a, std::int64_t columns, std::int64_t at) const {
    Row r;
    for (std::int64_t d = 0; d < columns; ++d) r.push_back(value_of(load_pattern(a.data, p_.dtype, at + d), p_.dtype));
    return r;
  }
  const AttentionInput& p_;
  std::int64_t b_, group_ = 0, shared_ = 0;  // keys in the group's pages
  std::vector<std::int64_t> path_;           // tokens that are a segment's keys
};

inline float chain(const Row& a, const Row& b) {
  float sum = 0.0f;
  for (std::size_t d = 0; d < a.size(); ++d) sum = std::fma(a[d], b[d], sum);
  return sum;
}
// Whether products follow rule 1, as on sm_90's matrix unit.
inline bool by_unit(const AttentionInput& p) {
  return p.arithmetic == rlk::Arithmetic::kSm90 && p.dtype != DType::kFloat32;
}
// sum + a . b in steps of 16; the last step is padded with +0. Elements have type t.
inline float rule_1(const Row& a, const Row& b, DType t, float sum) {
  Patterns x, y;
  for (const float v : a) x.push_back(rounded(v, t));
  for (const float v : b) y.push_back(rounded(v, t));
  return linear_test::dot(rlk::Arithmetic::kSm90, t, x, y, sum);
}
inline float product(const AttentionInput& p, const Row& q, const Row& k) {
  return by_unit(p) ? rule_1(q, k, p.dtype, 0.0f) : chain(q, k);
}
inline float as_element(float x, DType t) { return value_of(rounded(x, t), t); }
inline float scale_of(const AttentionInput& p) {
  return p.softcap > 0.0f ? 0x1.715476p+0f : 0x1.715476p+0f * p.softmax_scale;
}
// tanh of the softcap for a product x of q and k; then the score.
inline float tanh_of(const AttentionInput& p, float x) { return rlk::tanh(x * (p.softmax_scale / p.softcap)); }
inline float score(const AttentionInput& p, float x) { return p.softcap > 0.0f ? p.softcap * tanh_of(p, x) : x; }

// exp2 of fma(s, c, -m), and its lower clamp.
inline float exponential(float s, float c, float m, Exp exp) {
  if (exp == Exp::kHardware) return rlk::mufu_ex2_sm90(std::fmaf(s, c, -m));
  float q = (m - 120.0f) / c;
  if (std::fabs(m) <= 512.0f) q = bf16_toward_minus_infinity(q);
  s = std::max(s, q);
  const float t = std::fmaf(s, c, 0x1.8p23f - m), n = t - (0x1.8p23f - m);
  return std::ldexp(rlk::exp2_stat(std::fmaf(s, c, -n)), static_cast<int>(n - m));
}

// The order of rule 6, and orders that a test may use instead to see that the order decides bits.
struct Order {
  std::int64_t split = 0;                        // in keys; 0: rule 6's sizes, which grow with the key's number
  std::int64_t block = 128, block_of_wide = 64;  // in keys; the second number is for a head_dim above 128
  bool grouped = true;                           // a step of l's chains adds the sum of 32 keys, otherwise one key
  bool reciprocal = true;                        // out = O * fl(1 / l); otherwise O / l
  bool flushed = false;                          // a scaled sum below 2^-126 is +0
  bool descending = true;                        // order of dq's blocks
  bool chained = false;                          // dq is one chain over all blocks
  bool heads_outside = true;                     // dk and dv sum over queries within a head

  std::int64_t block_of(const AttentionInput& p) const { return p.head_dim > 128 ? block_of_wide : block; }
};

// x * 2^e for an integer e >= -126, else x * 0.
inline float scaled(float x, double e, const Order& order) {
  if (order.flushed) return times_power_of_two(x, e);
  return x * (e < -126 ? 0.0f : static_cast<float>(std::pow(2.0, e)));
}

inline std::size_t keys_of_split(const Order& order, std::size_t begin) {
  if (order.split > 0) return static_cast<std::size_t>(order.split);
  return begin < 8192 ? 1024 : begin < 65536 ? 2048 : 4096;
}

// Sums of one split, or of all splits.
struct Sums {
  float m = -kInf, l = 0.0f;  // m is NaN if the row has failed
  Row o;
};

inline Sums merged(const Sums& a, const Sums& b, const Order& order) {
  if (a.m == -kInf) return b;
  if (b.m == -kInf) return a;
  if (std::isnan(a.m) || std::isnan(b.m)) return {kNaN, 0.0f, a.o};
  Sums r;
  r.m = std::max(a.m, b.m);
  const auto sum = [&](float x, float y) {
    const float other = scaled(y, double{b.m} - r.m, order);
    if (order.flushed) return scaled(x, double{a.m} - r.m, order) + other;
    return std::fma(x, scaled(1.0f, double{a.m} - r.m, order), other);
  };
  r.l = sum(a.l, b.l);
  for (std::size_t d = 0; d < a.o.size(); ++d) r.o.push_back(sum(a.o[d], b.o[d]));
  return r;
}

// Keys [begin, end) of a row. A NaN score stays NaN; a key that is not seen has score -Inf.
inline Sums split_of(const AttentionParams& p, const std::vector<float>& scores, const std::vector<bool>& sees,
                     const std::vector<Row>& values, std::size_t begin, std::size_t end, const Order& order) {
  const float c = scale_of(p);
  const auto width = static_cast<std::size_t>(order.block_of(p));
  Sums s;
  s.o.assign(static_cast<std::size_t>(p.value_dim), 0.0f);
  float chains[8] = {}, largest = -kInf;
  for (std::size_t block = begin; block < end; block += width) {
    const std::size_t last = std::min(block + width, end);
    for (std::size_t j = block; j < last; ++j) {
      if (std::isnan(scores[j])) s.m = kNaN;
      largest = std::max(largest, scores[j]);
    }
    if (std::isnan(s.m) || largest == -kInf) continue;
    const float m = std::ceil(c * largest) + 0.0f;
    if (!(c * largest < 0x1p21f) || m >= 0x1p21f) s.m = kNaN;
    if (std::isnan(s.m) || m <= -0x1p21f) continue;
    if (s.m != -kInf && m > s.m) {
      for (float& x : chains) x = scaled(x, double{s.m} - m, order);
      for (float& x : s.o) x = scaled(x, double{s.m} - m, order);
    }
    s.m = m;
    Row probabilities(width, 0.0f), weights(last - block, 0.0f);
    for (std::size_t j = block; j < last; ++j) {
      if (scores[j] == -kInf) continue;
      const float probability = exponential(scores[j], c, m, p.exp), weight = as_element(probability, p.dtype);
      probabilities[j - block] = probability;
      weights[j - block] = weight;
      if (by_unit(p)) continue;
      for (std::size_t d = 0; d < s.o.size(); ++d) s.o[d] = std::fma(weight, values[j][d], s.o[d]);
    }
    const bool multiplies = by_unit(p) && std::count(sees.begin() + block, sees.begin() + last, true) != 0;
    for (std::size_t d = 0; multiplies && d < s.o.size(); ++d) {
      Row column;
      for (std::size_t j = block; j < last; ++j) column.push_back(values[j][d]);
      s.o[d] = rule_1(weights, column, p.dtype, s.o[d]);
    }
    for (std::size_t r = 0; r < 8; ++r) {
      float groups[4] = {};
      for (std::size_t j = r; j < width; j += 8) {
        float& sum = order.grouped ? groups[j / 32] : chains[r];
        sum = sum + probabilities[j];
      }
      if (!order.grouped) continue;
      chains[r] = chains[r] + (width == 64 ? groups[0] + groups[1] : (groups[0] + groups[1]) + (groups[2] + groups[3]));
    }
  }
  s.l = chains_to_leaf(chains);
  return s;
}

// Node of a head's sink.
inline Sums sink_of(const AttentionInput& p, std::int64_t head) {
  Sums s;
  s.o.assign(static_cast<std::size_t>(p.value_dim), 0.0f);
  const float u = 0x1.715476p+0f * p.sinks[head], m = std::ceil(u) + 0.0f;
  if (!(m < 0x1p21f)) s.m = kNaN;
  if (std::isnan(s.m) || m <= -0x1p21f) return s;
  s.m = m;
  if (p.exp == Exp::kHardware) {
    s.l = rlk::mufu_ex2_sm90(u - m);
  } else {
    const float n = (u + (0x1.8p23f - m)) - (0x1.8p23f - m);
    s.l = std::ldexp(rlk::exp2_stat(u - n), static_cast<int>(n - m));
  }
  return s;
}

struct ForwardPatterns {
  Patterns out, lse;
};
inline ForwardPatterns reference(const AttentionParams& p, const Order& order = {}) {
  const std::int64_t places = p.cu_seqlens_q ? p.q_tokens : p.num_sequences * p.q_tokens;
  ForwardPatterns r;
  r.out.assign(static_cast<std::size_t>(places * p.num_q_heads * p.value_dim), 0);
  r.lse.assign(static_cast<std::size_t>(places * p.num_q_heads), logprob_test::bits(-kInf));
  for (std::int64_t b = 0; b < p.num_sequences; ++b) {
    const Sequence sequence(p, b);
    for (std::int64_t h = 0; h < p.num_q_heads; ++h) {
      const std::int64_t kv_head = h / (p.num_q_heads / p.num_kv_heads);
      std::vector<Row> keys, values;
      for (std::int64_t j = 0; j < sequence.keys; ++j) {
        keys.push_back(sequence.key(p.k, p.head_dim, j, kv_head));
        // A row that sees a key without a page fails. For other rows a unit multiplies the value of that key too, so
        // the value is +0.
        values.push_back(sequence.has_page(j) ? sequence.key(p.v, p.value_dim, j, kv_head)
                                              : Row(static_cast<std::size_t>(p.value_dim), 0.0f));
      }
      for (std::int64_t i = 0; i < sequence.queries; ++i) {
        if (!sequence.sees_any(i)) continue;
        const Row q = sequence.query(p.q, p.head_dim, i, h);
        std::vector<float> scores;
        std::vector<bool> sees;
        for (std::int64_t j = 0; j < sequence.keys; ++j) {
          sees.push_back(sequence.sees(i, j));
          scores.push_back(sees.back() ? score(p, product(p, q, keys[static_cast<std::size_t>(j)])) : -kInf);
        }
        Sums all;
        for (std::size_t begin = 0; begin < scores.size();) {
          const std::size_t end = std::min(begin + keys_of_split(order, begin), scores.size());
          const Sums split = split_of(p, scores, sees, values, begin, end, order);
          all = begin == 0 ? split : merged(all, split, order);
          begin = end;
        }
        if (p.sinks) all = merged(all, sink_of(p, h), order);
        const bool fails = !(all.m > -kInf);
        const std::int64_t at = (sequence.place(i) * p.num_q_heads + h) * p.value_dim;
        for (std::int64_t d = 0; d < p.value_dim; ++d) {
          const float sum = all.o[static_cast<std::size_t>(d)], inverse = 1.0f / all.l;
          const float out = order.reciprocal ? sum * inverse : sum / all.l;
          r.out[static_cast<std::size_t>(at + d)] = rounded(fails ? kNaN : out + 0.0f, p.dtype);
        }
        const float lse = fails ? kNaN : 0x1.62e430p-1f * (all.m + rlk::log2(all.l));
        r.lse[static_cast<std::size_t>(sequence.lse_place(i, h))] = rounded(lse, DType::kFloat32);
      }
    }
  }
  return r;
}

struct BackwardPatterns {
  Patterns dq, dk, dv;
  Patterns dsinks;  // gradient of the sinks
};

// p and ds of a query's keys, rounded to dtype. Keys that the query does not see are left out.
struct Weights {
  Row q, dout, p, ds;
  std::vector<bool> seen;
  float of_sink = 0.0f, delta = 0.0f;
};
inline float probability_of(const AttentionInput& p, float t) {
  if (std::isnan(t)) return kNaN;
  if (p.exp == Exp::kHardware) return rlk::mufu_ex2_sm90(t);
  return t < -126.0f ? 0.0f : rlk::exp2(t > 127.0f ? 127.0f : t);
}
inline Weights weights_of(const AttentionBackwardParams& p, const Sequence& sequence, std::int64_t i, std::int64_t head,
                          const std::vector<Row>& keys, const std::vector<Row>& values) {
  Weights w{sequence.query(p.q, p.head_dim, i, head), sequence.query(p.dout, p.value_dim, i, head),
            Row(keys.size(), 0.0f), Row(keys.size(), 0.0f), std::vector<bool>(keys.size(), false)};
  const Row out = sequence.query(p.out, p.value_dim, i, head);
  float chains[8] = {};
  for (std::size_t d = 0; d < out.size(); ++d) chains[d % 8] = std::fma(w.dout[d], out[d], chains[d % 8]);
  const std::int64_t at = sequence.lse_place(i, head);
  float delta = chains_to_leaf(chains);
  if (p.dlse) delta = delta - p.dlse[at];
  const float c = scale_of(p), u = p.lse[at] * 0x1.715476p+0f;
  w.delta = delta;
  if (p.sinks) w.of_sink = probability_of(p, std::fmaf(p.lse[at], -0x1.715476p+0f, 0x1.715476p+0f * p.sinks[head]));
  for (std::size_t j = 0; j < keys.size(); ++j) {
    if (!sequence.sees(i, static_cast<std::int64_t>(j))) continue;
    const float x = product(p, w.q, keys[j]), s = score(p, x);
    if (s == -kInf) continue;
    const float probability = probability_of(p, std::fmaf(s, c, -u));
    w.seen[j] = true;
    float ds = probability * (product(p, w.dout, values[j]) - delta);
    if (p.softcap > 0.0f) ds = ds * std::fma(-tanh_of(p, x), tanh_of(p, x), 1.0f);
    w.ds[j] = as_element(ds, p.dtype);
    w.p[j] = as_element(probability, p.dtype);
  }
  return w;
}

inline void add_link(float weight, const Row& x, Row* sums) {
  for (std::size_t d = 0; d < x.size(); ++d) (*sums)[d] = std::fma(weight, x[d], (*sums)[d]);
}

// A step of a matrix unit: up to 16 weights and their rows.
struct Step {
  Row weights;
  std::vector<const Row*> rows;

  void add(float weight, const Row* row) {
    weights.push_back(weight);
    rows.push_back(row);
  }
  void take(DType t, Row* sums) {
    for (std::size_t d = 0; d < sums->size() && !rows.empty(); ++d) {
      Row column;
      for (const Row* row : rows) column.push_back((*row)[d]);
      (*sums)[d] = rule_1(weights, column, t, (*sums)[d]);
    }
    *this = {};
  }
};

// dsinks of a head from the rows' terms, without rows that add nothing: chains of 64 rows, trees of 128 chains.
inline float sink_gradient(const std::vector<std::pair<std::int64_t, std::pair<float, float>>>& rows) {
  float total = 0.0f;
  const std::int64_t last = rows.empty() ? 0 : rows.back().first;
  for (std::int64_t block = 0; block <= last / 8192; ++block) {
    std::vector<float> sums(128, 0.0f);
    for (const auto& [row, pair] : rows) {
      if (row / 8192 != block) continue;
      float& sum = sums[static_cast<std::size_t>(row % 8192 / 64)];
      sum = std::fma(pair.first, pair.second, sum);
    }
    while (sums.size() > 1) {
      for (std::size_t i = 0; i < sums.size() / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
      sums.resize(sums.size() / 2);
    }
    total = block == 0 ? sums[0] : total + sums[0];
  }
  return 0.0f - total;
}

// The sum of dq: one chain per block of keys; the blocks are added from the last to the first.
inline Row query_gradient(const AttentionBackwardParams& p, const Weights& w, const std::vector<Row>& keys,
                          const Order& order) {
  const auto size = static_cast<std::size_t>(p.head_dim), width = static_cast<std::size_t>(order.block_of(p));
  const std::size_t blocks = (keys.size() + width - 1) / width;
  Row sum(size, 0.0f), of_block(size, 0.0f);
  for (std::size_t n = 0; n < blocks; ++n) {
    const std::size_t begin = (order.descending && !order.chained ? blocks - 1 - n : n) * width;
    if (!order.chained) of_block.assign(size, 0.0f);
    Step step;
    for (std::size_t j = begin; j < std::min(begin + width, keys.size()); ++j) {
      if (!by_unit(p) && w.seen[j]) add_link(w.ds[j], keys[j], &of_block);
      if (by_unit(p)) step.add(w.ds[j], &keys[j]);
      if (j % 16 == 15) step.take(p.dtype, &of_block);
    }
    step.take(p.dtype, &of_block);
    if (order.chained) continue;
    for (std::size_t d = 0; d < size; ++d) sum[d] = sum[d] + of_block[d];
  }
  return order.chained ? of_block : sum;
}

// dk and dv of a query head by a matrix unit, in steps of 16 queries. Step floor(n / 16) has the query with position n.
inline void take_steps(const AttentionBackwardParams& p, const Sequence& sequence, std::int64_t head,
                       const std::vector<Row>& keys, const std::vector<Row>& values, std::vector<Row>* dk,
                       std::vector<Row>* dv) {
  const std::int64_t past = sequence.keys - sequence.queries;
  for (std::int64_t first = 0; first < sequence.queries;) {
    std::int64_t last = first + 1;
    const auto step_of = [&](std::int64_t i) { return std::floor(static_cast<double>(past + i) / 16); };
    while (last < sequence.queries && step_of(last) == step_of(first)) ++last;
    std::vector<Weights> weights;
    for (std::int64_t i = first; i < last; ++i) {
      if (sequence.sees_any(i)) weights.push_back(weights_of(p, sequence, i, head, keys, values));
    }
    for (std::size_t j = 0; j < keys.size(); ++j) {
      Step of_dk, of_dv;
      for (const Weights& w : weights) {
        of_dk.add(w.ds[j], &w.q);
        of_dv.add(w.p[j], &w.dout);
      }
      of_dk.take(p.dtype, &(*dk)[j]);
      of_dv.take(p.dtype, &(*dv)[j]);
    }
    first = last;
  }
}

inline BackwardPatterns reference(const AttentionBackwardParams& p, const Order& order = {}) {
  const std::int64_t places = p.cu_seqlens_q ? p.q_tokens : p.num_sequences * p.q_tokens;
  const std::int64_t key_places = p.cu_seqlens_k ? p.k_tokens : p.num_sequences * p.k_tokens;
  const auto size = static_cast<std::size_t>(p.head_dim), value_size = static_cast<std::size_t>(p.value_dim);
  BackwardPatterns r;
  r.dq.assign(static_cast<std::size_t>(places * p.num_q_heads) * size, 0);
  r.dk.assign(static_cast<std::size_t>(key_places * p.num_kv_heads) * size, 0);
  r.dv.assign(static_cast<std::size_t>(key_places * p.num_kv_heads) * value_size, 0);
  // Sums of the chains. A key that several segments of a tree share has several chains.
  std::vector<Row> all_dk(static_cast<std::size_t>(key_places * p.num_kv_heads), Row(size, 0.0f));
  std::vector<Row> all_dv(all_dk.size(), Row(value_size, 0.0f));
  const auto write = [&](Patterns* to, std::int64_t row, const Row& sums, float scale) {
    for (std::size_t d = 0; d < sums.size(); ++d)
      (*to)[static_cast<std::size_t>(row) * sums.size() + d] = rounded(sums[d] * scale + 0.0f, p.dtype);
  };
  const std::int64_t group = p.num_q_heads / p.num_kv_heads;
  std::vector<std::vector<std::pair<std::int64_t, std::pair<float, float>>>> of_sinks(
      static_cast<std::size_t>(p.num_q_heads));
  for (std::int64_t b = 0; b < p.num_sequences; ++b) {
    const Sequence sequence(p, b);
    for (std::int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
      std::vector<Row> keys, values;
      for (std::int64_t j = 0; j < sequence.keys; ++j) {
        keys.push_back(sequence.key(p.k, p.head_dim, j, kv_head));
        values.push_back(sequence.key(p.v, p.value_dim, j, kv_head));
      }
      std::vector<Row> dk(keys.size(), Row(size, 0.0f)), dv(keys.size(), Row(value_size, 0.0f));
      const auto take = [&](std::int64_t head, std::int64_t i) {
        if (!sequence.sees_any(i)) return;
        const Weights w = weights_of(p, sequence, i, head, keys, values);
        for (std::size_t j = 0; j < keys.size(); ++j) {
          if (by_unit(p) || !w.seen[j]) continue;
          add_link(w.ds[j], w.q, &dk[j]);
          add_link(w.p[j], w.dout, &dv[j]);
        }
        of_sinks[static_cast<std::size_t>(head)].push_back({sequence.place(i), {w.of_sink, w.delta}});
        const Row dq = query_gradient(p, w, keys, order);
        write(&r.dq, sequence.place(i) * p.num_q_heads + head, dq, p.softmax_scale);
      };
      if (order.heads_outside) {
        for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
          for (std::int64_t i = 0; i < sequence.queries; ++i) take(h, i);
        }
      } else {
        for (std::int64_t i = 0; i < sequence.queries; ++i) {
          for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) take(h, i);
        }
      }
      for (std::int64_t h = kv_head * group; by_unit(p) && h < (kv_head + 1) * group; ++h) {
        take_steps(p, sequence, h, keys, values, &dk, &dv);
      }
      for (std::size_t j = 0; j < keys.size(); ++j) {
        if (p.parents && sequence.key_place(static_cast<std::int64_t>(j)) < 0) continue;
        const auto row =
            static_cast<std::size_t>(sequence.key_place(static_cast<std::int64_t>(j)) * p.num_kv_heads + kv_head);
        for (std::size_t d = 0; d < size; ++d) all_dk[row][d] = all_dk[row][d] + dk[j][d];
        for (std::size_t d = 0; d < value_size; ++d) all_dv[row][d] = all_dv[row][d] + dv[j][d];
      }
    }
  }
  for (std::size_t row = 0; row < all_dk.size(); ++row) {
    write(&r.dk, static_cast<std::int64_t>(row), all_dk[row], p.softmax_scale);
    write(&r.dv, static_cast<std::int64_t>(row), all_dv[row], 1.0f);
  }
  for (std::int64_t h = 0; p.sinks && h < p.num_q_heads; ++h) {
    r.dsinks.push_back(rounded(sink_gradient(of_sinks[static_cast<std::size_t>(h)]), DType::kFloat32));
  }
  return r;
}

}  // namespace attention_test
