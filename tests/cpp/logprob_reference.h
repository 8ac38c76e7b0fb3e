// Calls of logprob and their expected results: a problem with its memory, and a second implementation of the forward.
// The reference is slow, independent of the backends, and written from rules 4 and 5 of docs/numerics.md.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "rlk/math/exp2.h"
#include "rlk/math/half.h"
#include "rlk/math/log2.h"
#include "rlk/math/mufu_model.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/logprob.h"

namespace logprob_test {

using rlk::DType;
using rlk::Exp;

inline constexpr float kInf = INFINITY;
inline const float kNaN = std::bit_cast<float>(0x7fc00000);
inline constexpr std::int64_t kIgnore = -100;

inline constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
#if RLK_TEST_HIP
inline constexpr Exp kExps[] = {Exp::kPortable};
#else
inline constexpr Exp kExps[] = {Exp::kPortable, Exp::kHardware};
#endif

inline std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

inline const char* name(DType t) {
  return t == DType::kFloat32 ? "float32" : t == DType::kBFloat16 ? "bfloat16" : "float16";
}

// ---------------------------------------------------------------------------------------------------------------------
// A call with its memory. Rows lie `stride` elements apart, `shift` bytes off any alignment.
struct Problem {
  std::int64_t rows = 1, columns = 1, stride = 1;
  DType dtype = DType::kFloat32;
  Exp exp = Exp::kPortable;
  std::int64_t vocab_size = 1, valid_vocab = 1;
  float logit_scale = 1.0f, softcap = 0.0f, label_smoothing = 0.0f;
  std::vector<unsigned char> memory;
  std::size_t shift = 0;
  std::vector<std::int64_t> target;
  std::vector<float> temperature;
  std::vector<std::int32_t> kept_ids;
  std::vector<std::int64_t> kept_offsets;

  Problem(std::int64_t rows, std::int64_t columns, DType dtype, unsigned seed, float spread = 4.0f)
      : rows(rows), columns(columns), stride(columns), dtype(dtype), vocab_size(columns), valid_vocab(columns) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(-1.0f, spread);
    resize();
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) set(i, j, normal(random));
      target.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(columns)));
      temperature.push_back(std::vector<float>{1.0f, 0.7f, 1.3f, 0.1f}[static_cast<std::size_t>(i) % 4]);
    }
  }
  int size() const { return rlk::size_of(dtype); }
  void resize() { memory.assign(static_cast<std::size_t>(rows * stride * size()) + 64, 0xa5); }
  // Spreads the rows and moves them off alignment.
  void spread_out(std::int64_t new_stride, std::size_t new_shift) {
    const Problem old = *this;
    stride = new_stride;
    shift = new_shift;
    resize();
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) set(i, j, old.at(i, j));
    }
  }
  unsigned char* address(std::int64_t i, std::int64_t j) {
    return memory.data() + shift + static_cast<std::size_t>((i * stride + j) * size());
  }
  float at(std::int64_t i, std::int64_t j) const {
    const unsigned char* p = const_cast<Problem*>(this)->address(i, j);
    if (dtype == DType::kFloat32) {
      float x;
      std::memcpy(&x, p, 4);
      return x;
    }
    std::uint16_t h;
    std::memcpy(&h, p, 2);
    return dtype == DType::kBFloat16 ? rlk::float_of_bf16(h) : rlk::float_of_f16(h);
  }
  void set(std::int64_t i, std::int64_t j, float x) {
    if (dtype == DType::kFloat32) {
      std::memcpy(address(i, j), &x, 4);
      return;
    }
    const std::uint16_t h = dtype == DType::kBFloat16 ? rlk::bf16_rn(x) : rlk::f16_rn(x);
    std::memcpy(address(i, j), &h, 2);
  }
  void keep(std::int64_t row, const std::vector<std::int32_t>& ids) {
    if (kept_offsets.empty()) kept_offsets.assign(static_cast<std::size_t>(rows) + 1, 0);
    kept_ids.insert(kept_ids.begin() + kept_offsets[row], ids.begin(), ids.end());
    for (std::int64_t i = row + 1; i <= rows; ++i) kept_offsets[i] += static_cast<std::int64_t>(ids.size());
  }
  template <class Params>
  Params params() const {
    Params p;
    p.logits = const_cast<Problem*>(this)->address(0, 0);
    p.target = target.data();
    p.temperature = temperature.data();
    if (!kept_offsets.empty()) {
      p.kept_ids = kept_ids.data();
      p.kept_offsets = kept_offsets.data();
      p.kept_size = static_cast<std::int64_t>(kept_ids.size());
    }
    p.dtype = dtype;
    p.exp = exp;
    p.logits_rows = {rows, 0, stride};
    p.target_rows = {rows, 0, 1};
    p.num_rows = rows;
    p.num_columns = columns;
    p.vocab_size = vocab_size;
    p.valid_vocab = valid_vocab;
    p.logit_scale = logit_scale;
    p.softcap = softcap;
    p.label_smoothing = label_smoothing;
    return p;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Rules 4 and 5, slowly.
struct Node {
  float m = -kInf, S = 0, E = 0, Q = 0;
  int status = 0;  // status of a failed node
  bool identity() const { return status == 0 && m == -kInf; }
};

inline float times_power_of_two(float x, double exponent) {
  const double y = std::ldexp(static_cast<double>(x), static_cast<int>(std::max(exponent, -2000.0)));
  return std::fabs(y) < 0x1p-126 ? 0.0f : static_cast<float>(y);
}

inline Node combine(const Node& a, const Node& b) {
  if (a.status != 0 || b.status != 0) return {kNaN, 0, 0, 0, a.status | b.status};
  if (a.identity()) return b;
  if (b.identity()) return a;
  const float M = std::max(a.m, b.m);
  const double da = a.m - M, db = b.m - M;
  return {M, times_power_of_two(a.S, da) + times_power_of_two(b.S, db),
          times_power_of_two(a.E, da) + times_power_of_two(b.E, db),
          times_power_of_two(a.Q, 2 * da) + times_power_of_two(b.Q, 2 * db)};
}

// Perfect binary tree over indices [first, first + width); a missing node is the identity.
inline Node tree(const std::vector<Node>& nodes, std::size_t first, std::size_t width) {
  if (first >= nodes.size()) return {};
  if (width == 1) return nodes[first];
  return combine(tree(nodes, first, width / 2), tree(nodes, first + width / 2, width / 2));
}
inline Node tree(const std::vector<Node>& nodes) {
  return tree(nodes, 0, std::bit_ceil(std::max<std::size_t>(nodes.size(), 1)));
}

inline float bf16_toward_minus_infinity(float q) {
  std::uint32_t b = bits(q) & 0xffff0000u;
  while (std::bit_cast<float>(b) > q) b += 0x10000u;  // only for a negative q: its magnitude grows
  return std::bit_cast<float>(b);
}

inline float chains_to_leaf(const float* r) {
  return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

// `z` of a leaf's columns; an empty element is a missing column.
inline Node leaf_of(const std::vector<std::optional<float>>& z, float c, Exp exp) {
  float largest = -kInf;
  bool nan = false;
  for (const auto& v : z) {
    if (!v) continue;
    nan |= std::isnan(*v);
    largest = std::fmax(largest, *v);
  }
  if (nan) return {kNaN, 0, 0, 0, rlk::kNanLogit};
  if (largest == -kInf) return {};
  const float m = std::ceil(c * largest) + 0.0f;
  if (!(m < 0x1p21f)) return {kNaN, 0, 0, 0, rlk::kInfLogit};
  if (m <= -0x1p21f) return {};
  float q = (m - 120.0f) / c;
  if (std::fabs(m) <= 512.0f) q = bf16_toward_minus_infinity(q);
  float S[8] = {}, E[8] = {}, Q[8] = {};
  for (std::size_t i = 0; i < z.size(); ++i) {
    if (!z[i] || *z[i] == -kInf) continue;
    const float v = std::max(*z[i], q);
    float e;
    if (exp == Exp::kHardware) {
      e = rlk::mufu_ex2_sm90(std::fmaf(v, c, -m));
    } else {
      const float shift = 1.5f * 0x1p23f - m;
      const float n = std::fmaf(v, c, shift) - shift;
      e = std::ldexp(rlk::exp2_stat(std::fmaf(v, c, -n)), static_cast<int>(n - m));
    }
    S[i % 8] += e;
    E[i % 8] = std::fmaf(e, v, E[i % 8]);
    Q[i % 8] = std::fmaf(e, e, Q[i % 8]);
  }
  return {m, chains_to_leaf(S), chains_to_leaf(E), chains_to_leaf(Q)};
}

inline std::int64_t cut(std::int64_t U, std::int64_t i) {
  return i == 8 ? U : std::min(U, 8 * (i * ((U + 7) / 8) / 8));
}

struct RowOutputs {
  float logprob, lse, entropy, sum_p_sq;
  std::int32_t status;
};

inline bool temperature_is_good(float t) { return std::isfinite(t) && t >= 0x1p-126f; }

inline std::optional<std::vector<bool>> kept_of(const Problem& p, std::int64_t row, bool* bad) {
  *bad = false;
  if (p.kept_offsets.empty()) return std::nullopt;
  const std::int64_t begin = p.kept_offsets[row], end = p.kept_offsets[row + 1];
  if (begin < 0 || begin > end || end > static_cast<std::int64_t>(p.kept_ids.size())) {
    *bad = true;
    return std::nullopt;
  }
  if (begin == end) return std::nullopt;
  std::vector<bool> kept(p.vocab_size, false);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t id = p.kept_ids[i];
    if (id < 0 || id >= p.valid_vocab) {
      *bad = true;
    } else {
      kept[id] = true;
    }
  }
  if (p.target[row] >= 0 && p.target[row] < p.valid_vocab) kept[p.target[row]] = true;
  return kept;
}

// z of a logit; h is the softcap's tanh.
inline float z_of(const Problem& p, float x, float* h = nullptr) {
  const float z = x * p.logit_scale;
  if (p.softcap == 0.0f || std::isinf(z)) return z;
  const float t = rlk::tanh(z * (1.0f / p.softcap));
  if (h != nullptr) *h = t;
  return p.softcap * t;
}

inline std::vector<Node> parts_of(const Problem& p, std::int64_t row) {
  bool bad = false;
  const auto kept = kept_of(p, row, &bad);
  const float c = rlk::kLog2e / p.temperature[row];
  std::vector<Node> parts;
  for (int i = 0; i < 8; ++i) {
    std::vector<Node> leaves;
    for (std::int64_t first = cut(p.vocab_size, i); first < cut(p.vocab_size, i + 1); first += 128) {
      std::vector<std::optional<float>> z;
      for (std::int64_t j = first; j < std::min(first + 128, cut(p.vocab_size, i + 1)); ++j) {
        const bool missing = j >= p.valid_vocab || (kept && !(*kept)[j]);
        z.push_back(missing ? std::nullopt : std::optional(z_of(p, p.at(row, j))));
      }
      leaves.push_back(leaf_of(z, c, p.exp));
    }
    parts.push_back(tree(leaves));
  }
  return parts;
}

// Sum of z for label smoothing: chains from +0, and the tree of the row's leaves.
inline float sum_of_z(const Problem& p, std::int64_t row) {
  std::vector<float> parts;
  const auto tree = [](std::vector<float> terms) {
    terms.resize(std::bit_ceil(std::max<std::size_t>(terms.size(), 1)), 0.0f);
    for (; terms.size() > 1; terms.resize(terms.size() / 2)) {
      for (std::size_t i = 0; i < terms.size() / 2; ++i) terms[i] = terms[2 * i] + terms[2 * i + 1];
    }
    return terms[0];
  };
  for (int i = 0; i < 8; ++i) {
    std::vector<float> leaves;
    for (std::int64_t first = cut(p.vocab_size, i); first < cut(p.vocab_size, i + 1); first += 128) {
      float chains[8] = {};
      const std::int64_t last = std::min({first + 128, cut(p.vocab_size, i + 1), p.valid_vocab});
      for (std::int64_t j = first; j < last; ++j) chains[(j - first) % 8] += z_of(p, p.at(row, j));
      leaves.push_back(chains_to_leaf(chains));
    }
    parts.push_back(tree(leaves));
  }
  return tree(parts);
}
inline float smoothed(const Problem& p, std::int64_t row, float logprob, float lse) {
  const float e = p.label_smoothing, mean = sum_of_z(p, row) / static_cast<float>(p.valid_vocab) / p.temperature[row];
  const float rest = mean - lse;
  if (std::isnan(logprob) || std::isnan(rest)) return kNaN;
  return std::fmaf(e, rest < 0.0f ? rest : 0.0f, (1.0f - e) * logprob);
}

inline RowOutputs reference(const Problem& p, std::int64_t row) {
  const std::int64_t y = p.target[row];
  if (y == kIgnore) return {0, 0, 0, 0, 0};
  const RowOutputs nothing = {kNaN, kNaN, kNaN, kNaN, 0};
  const bool bad_target = y < 0 || y >= p.valid_vocab;
  const float T = p.temperature[row];
  bool bad_kept = false;
  kept_of(p, row, &bad_kept);
  RowOutputs r = nothing;
  r.status = (temperature_is_good(T) ? 0 : rlk::kBadTemperature) | (bad_kept ? rlk::kBadKept : 0);
  if (r.status != 0) return r;
  const Node root = tree(parts_of(p, row));
  r.status = root.identity() ? rlk::kEmptyRow : root.status;
  if (bad_target && (r.status & rlk::kNanLogit) == 0) r.status |= rlk::kBadTarget;
  if ((r.status & ~rlk::kBadTarget) != 0) return r;
  const float log2_S = rlk::log2(root.S);
  r.lse = rlk::kLn2 * (root.m + log2_S);
  const float entropy = r.lse - (root.E / root.S) / T;
  r.entropy = entropy > 0.0f ? entropy : 0.0f;
  r.sum_p_sq = root.Q / (root.S * root.S);
  if (bad_target) return r;
  const float z = z_of(p, p.at(row, y));
  const float logprob = rlk::kLn2 * (std::fmaf(z, rlk::kLog2e / T, -root.m) - log2_S);
  r.logprob = logprob < 0.0f ? logprob : 0.0f;
  if (z == -kInf) r.status = rlk::kLabelMasked;
  if (p.label_smoothing != 0.0f) r.logprob = smoothed(p, row, r.logprob, r.lse);
  return r;
}

// The five fields of a shard that is the whole vocabulary.
inline std::vector<float> stats_reference(const Problem& p, std::int64_t row) {
  if (p.target[row] == kIgnore) return {-kInf, 0, 0, 0, kInf};
  bool bad_kept = false;
  kept_of(p, row, &bad_kept);
  Node root;
  root.status = (temperature_is_good(p.temperature[row]) ? 0 : rlk::kBadTemperature) | (bad_kept ? rlk::kBadKept : 0);
  if (root.status == 0) root = tree(parts_of(p, row));
  if (root.status != 0) root = {kNaN, static_cast<float>(root.status), 0, 0, root.status};
  if (root.status == 0 && p.label_smoothing != 0.0f) root.Q = sum_of_z(p, row);
  const bool here = p.target[row] >= 0 && p.target[row] < p.valid_vocab;
  const float z = here ? z_of(p, p.at(row, p.target[row])) : kNaN;
  return {root.m, root.S, root.E + 0.0f, root.Q, std::isnan(z) ? kNaN : z};  // -0 becomes +0
}

}  // namespace logprob_test
