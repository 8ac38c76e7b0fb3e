// logprob on the CPU, bit for bit against a second implementation written from docs/numerics.md, rules 4 and 5, and
// within its bounds against double.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cpu/isa.h"
#include "cpu/logprob.h"
#include "cpu/thread_pool.h"
#include "rlk/math/exp2.h"
#include "rlk/math/expm1.h"
#include "rlk/math/half.h"
#include "rlk/math/log2.h"
#include "rlk/math/mufu_model.h"
#include "rlk/math/tanh.h"
#include "rlk/ops/logprob.h"

namespace {

using rlk::DType;
using rlk::Exp;

constexpr float kInf = INFINITY;
const float kNaN = std::bit_cast<float>(0x7fc00000);
constexpr std::int64_t kIgnore = -100;

// One column; none of a part's edges where it could be; octets and leaves one short, whole and one long; a power of
// two; primes; Llama 3.
constexpr std::int64_t kVocab[] = {1, 2, 7, 8, 9, 63, 64, 127, 128, 129, 1000, 1024, 4099, 32003, 128256};
constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr Exp kExps[] = {Exp::kPortable, Exp::kHardware};

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

const char* name(DType t) { return t == DType::kFloat32 ? "float32" : t == DType::kBFloat16 ? "bfloat16" : "float16"; }

// ---------------------------------------------------------------------------------------------------------------------
// A call with its memory. Rows lie `stride` elements apart, `shift` bytes off any alignment.
struct Problem {
  std::int64_t rows = 1, columns = 1, stride = 1;
  DType dtype = DType::kFloat32;
  Exp exp = Exp::kPortable;
  std::int64_t vocab_size = 1, valid_vocab = 1;
  float logit_scale = 1.0f, softcap = 0.0f;
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
  // Moves the rows apart and off alignment.
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
    return p;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Rules 4 and 5, slowly.
struct Node {
  float m = -kInf, S = 0, E = 0, Q = 0;
  int status = 0;  // a failed node's
  bool identity() const { return status == 0 && m == -kInf; }
};

float times_power_of_two(float x, double exponent) {
  const double y = std::ldexp(static_cast<double>(x), static_cast<int>(std::max(exponent, -2000.0)));
  return std::fabs(y) < 0x1p-126 ? 0.0f : static_cast<float>(y);
}

Node combine(const Node& a, const Node& b) {
  if (a.status != 0 || b.status != 0) return {kNaN, 0, 0, 0, a.status | b.status};
  if (a.identity()) return b;
  if (b.identity()) return a;
  const float M = std::max(a.m, b.m);
  const double da = a.m - M, db = b.m - M;
  return {M, times_power_of_two(a.S, da) + times_power_of_two(b.S, db),
          times_power_of_two(a.E, da) + times_power_of_two(b.E, db),
          times_power_of_two(a.Q, 2 * da) + times_power_of_two(b.Q, 2 * db)};
}

// Perfect binary tree over indices [first, first + width); an index without a node is the identity.
Node tree(const std::vector<Node>& nodes, std::size_t first, std::size_t width) {
  if (first >= nodes.size()) return {};
  if (width == 1) return nodes[first];
  return combine(tree(nodes, first, width / 2), tree(nodes, first + width / 2, width / 2));
}
Node tree(const std::vector<Node>& nodes) {
  return tree(nodes, 0, std::bit_ceil(std::max<std::size_t>(nodes.size(), 1)));
}

float bf16_toward_minus_infinity(float q) {
  std::uint32_t b = bits(q) & 0xffff0000u;
  while (std::bit_cast<float>(b) > q) b += 0x10000u;  // only of a negative q: its magnitude grows
  return std::bit_cast<float>(b);
}

float chains_to_leaf(const float* r) { return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7])); }

// `z` of a leaf's columns; empty means missing.
Node leaf_of(const std::vector<std::optional<float>>& z, float c, Exp exp) {
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

std::int64_t cut(std::int64_t U, std::int64_t i) { return i == 8 ? U : std::min(U, 8 * (i * ((U + 7) / 8) / 8)); }

struct RowOutputs {
  float logprob, lse, entropy, sum_p_sq;
  std::int32_t status;
};

bool temperature_is_good(float t) { return std::isfinite(t) && t >= 0x1p-126f; }

std::optional<std::vector<bool>> kept_of(const Problem& p, std::int64_t row, bool* bad) {
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
float z_of(const Problem& p, float x, float* h = nullptr) {
  const float z = x * p.logit_scale;
  if (p.softcap == 0.0f || std::isinf(z)) return z;
  const float t = rlk::tanh(z * (1.0f / p.softcap));
  if (h != nullptr) *h = t;
  return p.softcap * t;
}

std::vector<Node> parts_of(const Problem& p, std::int64_t row) {
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

RowOutputs reference(const Problem& p, std::int64_t row) {
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
  return r;
}

// ---------------------------------------------------------------------------------------------------------------------
// The backend, with a canary on both sides of every output.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::int64_t n) : n_(n), v_(static_cast<std::size_t>(n) + 2 * kGuard, canary()) {}
  T* data() { return v_.data() + kGuard; }
  T operator[](std::int64_t i) const { return v_[static_cast<std::size_t>(i) + kGuard]; }
  bool intact() const {
    for (int i = 0; i < kGuard; ++i) {
      if (v_[i] != canary() || v_[static_cast<std::size_t>(n_) + kGuard + i] != canary()) return false;
    }
    return true;
  }

 private:
  static constexpr int kGuard = 16;
  static T canary() { return static_cast<T>(7777); }
  std::int64_t n_;
  std::vector<T> v_;
};

struct Result {
  Guarded<float> logprob, lse, entropy, sum_p_sq;
  Guarded<std::int32_t> status;
  explicit Result(std::int64_t n) : logprob(n), lse(n), entropy(n), sum_p_sq(n), status(n) {}
  template <class Params>
  void point(Params* p) {
    p->logprob = logprob.data();
    p->lse = lse.data();
    p->entropy = entropy.data();
    p->sum_p_sq = sum_p_sq.data();
    p->status = status.data();
  }
  bool intact() const {
    return logprob.intact() && lse.intact() && entropy.intact() && sum_p_sq.intact() && status.intact();
  }
};

std::vector<rlk::cpu::Isa> isas() {
  std::vector<rlk::cpu::Isa> found;
  for (const auto isa : rlk::cpu::kIsas) {
    if (rlk::cpu::isa_supported(isa)) found.push_back(isa);
  }
  return found;
}

// Every instruction set with every number of threads.
void for_each_backend(const std::function<void(const std::string&)>& test) {
  for (const auto isa : isas()) {
    rlk::cpu::set_isa(isa);
    for (const int threads : {1, 2, 3}) {
      rlk::cpu::set_num_threads(threads);
      test(std::string(rlk::cpu::isa_name(isa)) + ", threads " + std::to_string(threads));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

void expect_row(const RowOutputs& want, const Result& got, std::int64_t i, const std::string& where) {
  const auto same = [&](float a, float b, const char* output) {
    EXPECT_EQ(bits(a), bits(b)) << where << ", row " << i << ", " << output << ": " << a << ' ' << b;
    return bits(a) == bits(b);
  };
  ASSERT_EQ(want.status, got.status[i]) << where << ", row " << i;
  ASSERT_TRUE(same(want.logprob, got.logprob[i], "logprob"));
  ASSERT_TRUE(same(want.lse, got.lse[i], "lse"));
  ASSERT_TRUE(same(want.entropy, got.entropy[i], "entropy"));
  ASSERT_TRUE(same(want.sum_p_sq, got.sum_p_sq[i], "sum_p_sq"));
}

// The five fields that a shard gives which is the whole vocabulary.
std::vector<float> stats_reference(const Problem& p, std::int64_t row) {
  if (p.target[row] == kIgnore) return {-kInf, 0, 0, 0, kInf};
  bool bad_kept = false;
  kept_of(p, row, &bad_kept);
  Node root;
  root.status = (temperature_is_good(p.temperature[row]) ? 0 : rlk::kBadTemperature) | (bad_kept ? rlk::kBadKept : 0);
  if (root.status == 0) root = tree(parts_of(p, row));
  if (root.status != 0) root = {kNaN, static_cast<float>(root.status), 0, 0, root.status};
  const bool here = p.target[row] >= 0 && p.target[row] < p.valid_vocab;
  const float z = here ? z_of(p, p.at(row, p.target[row])) : kNaN;
  return {root.m, root.S, root.E + 0.0f, root.Q, std::isnan(z) ? kNaN : z};  // -0 becomes +0
}

void check(const Problem& p, const std::string& what) {
  std::vector<RowOutputs> want;
  std::vector<float> want_stats;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    want.push_back(reference(p, i));
    const auto fields = stats_reference(p, i);
    want_stats.insert(want_stats.end(), fields.begin(), fields.end());
  }
  for_each_backend([&](const std::string& backend) {
    const std::string where = what + ", V " + std::to_string(p.columns) + ", " + name(p.dtype) +
                              (p.exp == Exp::kPortable ? ", portable, " : ", hardware, ") + backend;
    auto params = p.params<rlk::LogprobParams>();
    Result all(p.rows);
    all.point(&params);
    rlk::cpu::logprob(params);
    ASSERT_TRUE(all.intact()) << where;
    for (std::int64_t i = 0; i < p.rows; ++i) ASSERT_NO_FATAL_FAILURE(expect_row(want[i], all, i, where));

    // Without the moments another kernel runs.
    Result some(p.rows);
    some.point(&params);
    params.entropy = params.sum_p_sq = nullptr;
    rlk::cpu::logprob(params);
    ASSERT_TRUE(some.intact()) << where;
    for (std::int64_t i = 0; i < p.rows; ++i) {
      ASSERT_EQ(bits(want[i].logprob), bits(some.logprob[i])) << where << ", row " << i;
      ASSERT_EQ(bits(want[i].lse), bits(some.lse[i])) << where << ", row " << i;
      ASSERT_EQ(want[i].status, some.status[i]) << where << ", row " << i;
    }

    Guarded<float> stats(5 * p.rows);
    params.stats = stats.data();
    rlk::cpu::logprob(params);
    ASSERT_TRUE(stats.intact()) << where;
    for (std::int64_t k = 0; k < 5 * p.rows; ++k) {
      ASSERT_EQ(bits(want_stats[k]), bits(stats[k])) << where << ", row " << k / 5 << ", field " << k % 5;
    }
  });
}

class Logprob : public testing::Test {
 protected:
  void TearDown() override {
    rlk::cpu::set_isa(isas().back());
    rlk::cpu::set_num_threads(2);
  }
};

TEST_F(Logprob, EveryVocabularyHasTheBitsOfTheContract) {
  for (const std::int64_t V : kVocab) {
    for (const DType dtype : kDtypes) {
      for (const Exp exp : kExps) {
        Problem p(V > 100000 ? 1 : 3, V, dtype, static_cast<unsigned>(V));
        p.exp = exp;
        ASSERT_NO_FATAL_FAILURE(check(p, "random"));
      }
    }
  }
}

TEST_F(Logprob, EveryLengthOfALeafAndOfABlockOfLeaves) {
  // Part 0 of U = 8 n + 7 columns has 8 floor((n + 1) / 8) of them: lengths from one octet to past sixteen leaves.
  for (std::int64_t octets = 1; octets <= 280; octets += octets < 40 ? 1 : 23) {
    for (const DType dtype : kDtypes) {
      Problem p(1, 64 * octets + 13, dtype, static_cast<unsigned>(octets));
      ASSERT_NO_FATAL_FAILURE(check(p, "length"));
    }
  }
}

TEST_F(Logprob, RowsMayBeStridedAndUnaligned) {
  for (const DType dtype : kDtypes) {
    for (const std::size_t shift : {0, 1, 2, 6, 8, 31}) {
      Problem p(5, 1283, dtype, 3);
      p.spread_out(1283 + 17, shift);
      ASSERT_NO_FATAL_FAILURE(check(p, "shift " + std::to_string(shift)));
    }
  }
}

TEST_F(Logprob, TwoLevelRowLayout) {
  Problem p(6, 300, DType::kBFloat16, 4);
  p.spread_out(310, 0);
  // Rows 0, 1, 3, 4 of the six: two outer steps of two inner rows. Targets and outputs are those of the four.
  std::vector<std::int64_t> target;
  std::vector<RowOutputs> want;
  p.temperature.assign(6, 1.0f);
  for (const std::int64_t i : {0, 1, 3, 4}) {
    target.push_back(p.target[i]);
    want.push_back(reference(p, i));
  }
  auto params = p.params<rlk::LogprobParams>();
  Result got(4);
  got.point(&params);
  params.num_rows = 4;
  params.logits_rows = {2, 3 * 310, 310};
  params.target = target.data();
  params.target_rows = {4, 0, 1};
  rlk::cpu::logprob(params);
  for (std::int64_t i = 0; i < 4; ++i) expect_row(want[i], got, i, "two levels");
}

TEST_F(Logprob, TargetsMayBeInt32) {
  Problem p(3, 300, DType::kFloat32, 5);
  std::vector<std::int32_t> target(5, -1);
  target[0] = static_cast<std::int32_t>(p.target[0]);
  target[2] = static_cast<std::int32_t>(p.target[1]);
  target[4] = -100;
  p.target[2] = kIgnore;
  auto params = p.params<rlk::LogprobParams>();
  Result got(3);
  got.point(&params);
  params.target = target.data();
  params.target_dtype = DType::kInt32;
  params.target_rows = {3, 0, 2};
  rlk::cpu::logprob(params);
  for (std::int64_t i = 0; i < 3; ++i) expect_row(reference(p, i), got, i, "int32");
}

TEST_F(Logprob, ScaleSoftcapAndTemperature) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      for (const float scale : {1.0f, 0.0625f, 3.3f}) {
        for (const float softcap : {0.0f, 30.0f, 0.5f}) {
          Problem p(4, 2500, dtype, 6, 20.0f);
          p.exp = exp;
          p.logit_scale = scale;
          p.softcap = softcap;
          p.set(0, 7, -kInf);
          p.set(1, 2400, kInf);
          p.set(2, 1, kNaN);
          ASSERT_NO_FATAL_FAILURE(check(p, "scale " + std::to_string(scale) + ", softcap " + std::to_string(softcap)));
        }
      }
    }
  }
}

TEST_F(Logprob, ExtremeTemperatures) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      // In range from 2^-126 on; log2e / T is subnormal at the largest T.
      const std::vector<float> temperatures = {0x1p-126f, 1e-30f, 1e-4f,     1e4f, 1e30f, 0x1.fffffep127f,
                                               0.0f,      -1.0f,  0x1p-127f, kInf, kNaN};
      Problem p(static_cast<std::int64_t>(temperatures.size()), 700, dtype, 7);
      p.exp = exp;
      p.temperature = temperatures;
      p.set(5, 3, -kInf);
      p.set(10, p.target[10], kNaN);  // not seen, and not taken for a bad target
      ASSERT_NO_FATAL_FAILURE(check(p, "temperature"));
    }
  }
}

TEST_F(Logprob, ColumnsFarBelowTheLargest) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      Problem p(8, 3001, dtype, 8);
      p.exp = exp;
      p.temperature = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 0.7f, 1.3f};
      std::mt19937 random(9);
      for (std::int64_t j = 0; j < p.columns; ++j) {
        p.set(0, j, std::uniform_real_distribution<float>(-300.0f, 10.0f)(random));  // crosses the clamp
        p.set(1, j, std::uniform_real_distribution<float>(-90.0f, 0.0f)(random));    // close to it
        p.set(2, j, std::uniform_real_distribution<float>(300.0f, 900.0f)(random));  // |m| > 512: q is not rounded
        p.set(3, j, std::uniform_real_distribution<float>(-900.0f, -300.0f)(random));
        p.set(4, j, std::uniform_real_distribution<float>(-60000.0f, 60000.0f)(random));
        p.set(5, j, j == 1500 ? 30000.0f : -60000.0f + static_cast<float>(j));  // one column is everything
        // The largest adds nothing to E, which is then all clamped columns: q and its rounding show.
        p.set(6, j, j % 128 == 5 ? 0.0f : -1000.0f - static_cast<float>(j % 50));
        p.set(7, j, j % 128 == 5 ? 0.0f : -50.0f - static_cast<float>(j % 100));
      }
      ASSERT_NO_FATAL_FAILURE(check(p, "far below"));
    }
  }
}

TEST_F(Logprob, NumbersNearTheEndsOfTheRange) {
  for (const Exp exp : kExps) {
    Problem p(13, 1100, DType::kFloat32, 10);
    p.exp = exp;
    p.temperature.assign(13, 1.0f);
    for (const int i : {8, 9, 10}) p.temperature[i] = rlk::kLog2e;  // c = 1
    p.temperature[11] = 0x1.fffffep127f;
    for (std::int64_t j = 0; j < p.columns; ++j) {
      const float sign = j % 3 == 0 ? -1.0f : 1.0f;
      p.set(0, j, sign * 0x1p-140f);                            // subnormal logits
      p.set(1, j, sign * 0.0f);                                 // zeros of both signs
      p.set(2, j, -1e6f - static_cast<float>(j));               // near -2^21 in log2
      p.set(3, j, -1.5e6f + static_cast<float>(j % 7) * 1e4f);  // leaves on both sides of -2^21
      p.set(4, j, 1.4e6f + static_cast<float>(j));              // near 2^21
      p.set(5, j, j == 900 ? 1.46e6f : 0.0f);                   // one past 2^21
      p.set(6, j, -3e38f);                                      // every leaf is the identity
      p.set(7, j, j == 5 ? 3e38f : 1.0f);                       // c z overflows
      p.set(8, j, j == 5 ? 2097151.875f : 2097000.0f);          // its ceil is 2^21: too much
      p.set(9, j, j < 600 ? -2097152.0f : -2097151.875f);       // -2^21 is the identity, its neighbour not
      p.set(10, j, -2097152.0f);
      p.set(11, j, j < 128 ? 1e38f : j == 128 ? 2.5e38f : -kInf);  // E overflows where m is the lower one
      p.set(12, j, j > 140 && j < 150 ? 0x1p-140f : -kInf);        // E of the only leaf is subnormal
    }
    ASSERT_NO_FATAL_FAILURE(check(p, "ends of the range"));
  }
}

TEST_F(Logprob, NonFiniteLogits) {
  for (const DType dtype : kDtypes) {
    Problem p(14, 2100, dtype, 11);
    for (std::int64_t j = 0; j < p.columns; ++j) {
      if (j % 2 == 0) p.set(0, j, -kInf);     // scattered
      if (j < 1500) p.set(1, j, -kInf);       // whole leaves and parts
      p.set(2, j, -kInf);                     // an empty row
      p.set(3, j, j == 1234 ? 1.0f : -kInf);  // one column left
    }
    p.set(4, 0, kNaN);
    p.set(5, 2099, -kNaN);
    p.set(6, 700, kInf);
    p.set(7, 700, kInf);
    p.set(7, 701, kNaN);  // the leaf is NaN
    p.set(8, 10, kInf);
    p.set(8, 2000, kNaN);  // two leaves, two bits
    p.target[9] = 55;
    p.set(9, 55, -kInf);  // the label is masked
    p.target[10] = 56;
    p.set(10, 56, kNaN);  // the label is NaN
    p.target[11] = 57;
    p.set(11, 57, kInf);
    p.target[2] = 3;
    p.target[12] = 5000;  // bad, in a row with a NaN and in a row with +Inf
    p.set(12, 1, kNaN);
    p.target[13] = -1;
    p.set(13, 1, kInf);
    ASSERT_NO_FATAL_FAILURE(check(p, "non-finite"));
  }
}

TEST_F(Logprob, EveryNanIsSeenWhereverItStands) {
  for (const DType dtype : kDtypes) {
    Problem p(1, 400, dtype, 12);
    for (std::int64_t j = 0; j < p.columns; ++j) {
      for (const std::uint32_t sign : {0u, 0x80000000u}) {
        Problem q = p;
        // Payload of one low bit: a comparison of the upper bits alone would miss it.
        if (dtype == DType::kFloat32) {
          q.set(0, j, std::bit_cast<float>(0x7f800001u | sign));
        } else {
          const std::uint32_t nan = dtype == DType::kBFloat16 ? 0x7f81u : 0x7c01u;
          const auto h = static_cast<std::uint16_t>(nan | sign >> 16);
          std::memcpy(q.address(0, j), &h, 2);
        }
        auto params = q.params<rlk::LogprobParams>();
        std::int32_t status = 0;
        params.status = &status;
        rlk::cpu::set_isa(isas()[static_cast<std::size_t>(j) % isas().size()]);
        rlk::cpu::logprob(params);
        ASSERT_EQ(status, rlk::kNanLogit) << name(dtype) << " column " << j;
      }
    }
  }
}

TEST_F(Logprob, PaddedAndCanonicalVocabularies) {
  for (const DType dtype : kDtypes) {
    for (const std::int64_t V : {1, 9, 130, 1000, 4099}) {
      for (const std::int64_t U : {V, V + 1, V + 64, 2 * V + 500}) {
        for (const std::int64_t valid : {V, V - V / 3, std::int64_t{1}, std::int64_t{0}}) {
          Problem p(2, V, dtype, static_cast<unsigned>(V));
          p.vocab_size = U;
          p.valid_vocab = valid;
          for (std::int64_t j = valid; j < V; ++j) p.set(0, j, kNaN);  // padding may hold anything
          p.target[0] = 0;
          ASSERT_NO_FATAL_FAILURE(check(p, "U " + std::to_string(U) + ", valid " + std::to_string(valid)));
        }
      }
    }
  }
}

TEST_F(Logprob, IgnoredRowsAndBadTargets) {
  for (const DType dtype : kDtypes) {
    Problem p(8, 500, dtype, 13);
    p.valid_vocab = 490;
    p.target = {kIgnore, -1, 490, 499, 500, std::int64_t{1} << 40, -(std::int64_t{1} << 40), 489};
    for (std::int64_t j = 0; j < 500; ++j) p.set(0, j, kNaN);
    p.temperature[0] = kNaN;
    p.keep(0, {-5, 9999});
    ASSERT_NO_FATAL_FAILURE(check(p, "targets"));
  }
}

TEST_F(Logprob, AnIgnoredRowIsNotRead) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  const std::int64_t V = page / 4;
  void* memory =
      mmap(nullptr, static_cast<std::size_t>(3 * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  float* logits = static_cast<float*>(memory);
  for (std::int64_t i = 0; i < 3 * V; ++i) logits[i] = static_cast<float>(i % 13);
  ASSERT_EQ(mprotect(logits + V, static_cast<std::size_t>(page), PROT_NONE), 0);
  const std::vector<std::int64_t> target = {3, kIgnore, 5};
  std::vector<float> stats(15), d(3, 1.0f), dlogits(static_cast<std::size_t>(3 * V), 9.0f);
  for_each_backend([&](const std::string& where) {
    rlk::LogprobParams p;
    p.logits = logits;
    p.target = target.data();
    p.logits_rows = {3, 0, V};
    p.target_rows = {3, 0, 1};
    p.num_rows = 3;
    p.num_columns = p.vocab_size = p.valid_vocab = V;
    Result r(3);
    r.point(&p);
    rlk::cpu::logprob(p);
    ASSERT_EQ(r.status[1], 0) << where;
    ASSERT_EQ(bits(r.lse[1]), 0u) << where;
    p.stats = stats.data();
    rlk::cpu::logprob(p);
    ASSERT_EQ(stats[5], -kInf) << where;
    ASSERT_EQ(stats[9], kInf) << where;

    rlk::LogprobBackwardParams b;
    static_cast<rlk::LogprobInput&>(b) = p;
    b.lse = r.lse.data();
    b.dlogprob = d.data();
    b.dlogprob_rows = {3, 0, 1};
    b.dlogits = dlogits.data();
    b.dlogits_rows = {3, 0, V};
    rlk::cpu::logprob_backward(b);
    for (std::int64_t j = 0; j < V; ++j) ASSERT_EQ(bits(dlogits[V + j]), 0u) << where;
  });
  munmap(memory, static_cast<std::size_t>(3 * page));
}

TEST_F(Logprob, KeptSets) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      Problem p(9, 5003, dtype, 14);
      p.exp = exp;
      p.valid_vocab = 5000;
      std::mt19937 random(15);
      std::vector<std::int32_t> many;
      for (int i = 0; i < 3000; ++i) many.push_back(static_cast<std::int32_t>(random() % 5000));
      p.keep(0, {17});                 // and the target
      p.keep(1, many);                 // any order, repeats
      p.keep(3, {0, 4999, 128, 127});  // row 2 keeps everything
      p.keep(4, {1, 5000});            // past valid_vocab
      p.keep(5, {-1});
      p.keep(6, {2147483647, -2147483647});
      p.keep(7, {40, 41, 42});
      p.set(7, 41, -kInf);
      p.set(7, 43, kNaN);  // not kept, not seen
      p.keep(8, {40, 41, 42});
      p.set(8, 41, kNaN);
      p.target[8] = 6000;
      ASSERT_NO_FATAL_FAILURE(check(p, "kept"));
    }
  }
}

TEST_F(Logprob, KeptOffsetsThatDescendOrPassTheEnd) {
  Problem p(5, 300, DType::kFloat32, 16);
  p.kept_ids = {1, 2, 3};
  p.kept_offsets = {0, 2, 1, 9, -4, 3};
  ASSERT_NO_FATAL_FAILURE(check(p, "offsets"));
}

TEST_F(Logprob, ShardsMergeToTheBitsOfTheWhole) {
  for (const std::int64_t U : {1, 9, 64, 1000, 4099, 128256}) {
    for (const DType dtype : kDtypes) {
      Problem p(U > 100000 ? 2 : 8, U, dtype, static_cast<unsigned>(U));
      p.valid_vocab = U - U / 50;
      p.target.back() = kIgnore;
      if (p.rows > 2) {
        p.target[1] = U;
        p.temperature[2] = 0.0f;
        p.set(3, 0, kNaN);
        p.set(4, U / 2, kInf);
        p.set(5, p.target[5], -kInf);
        p.keep(6, {0, static_cast<std::int32_t>(p.valid_vocab / 2)});
        p.temperature[7] = kNaN;  // of the ignored row
      }
      for (const int shards : {1, 2, 4, 8}) {
        Guarded<float> stats(5 * p.rows * shards);
        for (int s = 0; s < shards; ++s) {
          const std::int64_t begin = cut(U, s * 8 / shards), end = cut(U, (s + 1) * 8 / shards);
          auto params = p.params<rlk::LogprobParams>();
          params.logits = p.address(0, begin);
          params.vocab_start = begin;
          params.num_columns = end - begin;
          params.stats = stats.data() + 5 * p.rows * s;
          rlk::cpu::set_num_threads(1 + s % 3);
          rlk::cpu::logprob(params);
        }
        ASSERT_TRUE(stats.intact());
        rlk::LogprobMergeParams merge;
        Result got(p.rows);
        got.point(&merge);
        merge.stats = stats.data();
        merge.temperature = p.temperature.data();
        merge.num_rows = p.rows;
        merge.num_shards = shards;
        rlk::cpu::logprob_merge(merge);
        ASSERT_TRUE(got.intact());
        for (std::int64_t i = 0; i < p.rows; ++i) {
          expect_row(reference(p, i), got, i, "U " + std::to_string(U) + ", shards " + std::to_string(shards));
        }
      }
    }
  }
}

TEST_F(Logprob, WithinTheBoundsOfNumericsAgainstDouble) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      for (const float spread : {1.0f, 4.0f, 20.0f}) {
        Problem p(4, 32003, dtype, 17, spread);
        p.exp = exp;
        auto params = p.params<rlk::LogprobParams>();
        Result got(p.rows);
        got.point(&params);
        rlk::cpu::logprob(params);
        for (std::int64_t i = 0; i < p.rows; ++i) {
          const double T = p.temperature[i];
          double largest = -kInf, magnitude = 0;
          for (std::int64_t j = 0; j < p.columns; ++j) {
            largest = std::max(largest, p.at(i, j) / T);
            magnitude = std::max(magnitude, std::fabs(p.at(i, j) / T));
          }
          double sum = 0, weighted = 0, squares = 0;
          for (std::int64_t j = 0; j < p.columns; ++j) {
            const double e = std::exp(p.at(i, j) / T - largest);
            sum += e;
            weighted += e * (p.at(i, j) / T);
            squares += e * e;
          }
          const double lse = largest + std::log(sum);
          EXPECT_NEAR(got.lse[i], lse, 1e-5 + 4e-7 * magnitude);
          EXPECT_NEAR(got.logprob[i], p.at(i, p.target[i]) / T - lse, 1e-5 + 4e-7 * magnitude);
          EXPECT_NEAR(got.entropy[i], lse - weighted / sum, 2e-5 + 4e-7 * magnitude);
          EXPECT_NEAR(got.sum_p_sq[i], squares / (sum * sum), 1e-5 * squares / (sum * sum));
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward.
struct Upstream {
  std::vector<float> dlogprob, dlse, dentropy;
};

float backward_reference(const Problem& p, std::int64_t row, std::int64_t j, const Upstream& d, float lse,
                         float entropy) {
  const auto value = [&](const std::vector<float>& v) { return v.empty() ? 0.0f : v[row]; };
  const float dlogprob = value(d.dlogprob), dlse = value(d.dlse), dentropy = value(d.dentropy);
  const std::int64_t y = p.target[row];
  if (y == kIgnore || (dlogprob == 0 && dlse == 0 && dentropy == 0)) return 0.0f;
  bool bad = false;
  const auto kept = kept_of(p, row, &bad);
  if (j >= p.valid_vocab || (kept && !(*kept)[j])) return 0.0f;
  const float T = p.temperature[row];
  const bool bad_target = y < 0 || y >= p.valid_vocab;
  const float k = p.logit_scale / T, c = rlk::kLog2e / T, u = lse * rlk::kLog2e;
  float h = 0.0f;
  const float z = z_of(p, p.at(row, j), &h);
  const float t = std::fmaf(z, c, -u);
  float p_j = 0.0f;
  if (!(t < -126.0f)) {
    const float bounded = t > 127.0f ? 127.0f : t;
    p_j = p.exp == Exp::kHardware ? rlk::mufu_ex2_sm90(bounded) : rlk::exp2(bounded);
  }
  const float a = std::fmaf(-dentropy, d.dentropy.empty() ? 0.0f : entropy, dlse) * k;
  const float b = (-dentropy * rlk::kLn2) * k;
  const float g = bad_target && dlogprob != 0 ? kNaN : dlogprob * k;
  const float low = t < -127.0f ? -127.0f : t;
  float dz = j == y ? std::fmaf(p_j, std::fmaf(b, low, a), -g * rlk::expm1(rlk::kLn2 * t))
                    : std::fmaf(p_j, std::fmaf(b, low, a - g), 0.0f);
  if (p.softcap != 0.0f) dz = z == -kInf ? 0.0f : dz * std::fmaf(-h, h, 1.0f);
  return dz;
}

std::uint32_t stored_bits(DType dtype, float x) {
  switch (dtype) {
    case DType::kBFloat16:
      return std::isnan(x) ? 0x7fffu : rlk::bf16_rn(x);
    case DType::kFloat16:
      return std::isnan(x) ? 0x7fffu : rlk::f16_rn(x);
    default:
      return std::isnan(x) ? 0x7fc00000u : bits(x);
  }
}

void check_backward(const Problem& p, const Upstream& d, const std::string& what) {
  auto forward = p.params<rlk::LogprobParams>();
  Result saved(p.rows);
  saved.point(&forward);
  rlk::cpu::logprob(forward);
  std::vector<std::uint32_t> want;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    for (std::int64_t j = 0; j < p.columns; ++j) {
      want.push_back(stored_bits(p.dtype, backward_reference(p, i, j, d, saved.lse[i], saved.entropy[i])));
    }
  }
  // An incoming gradient lies two elements apart.
  const auto spread = [](const std::vector<float>& v) {
    std::vector<float> s;
    for (const float x : v) s.insert(s.end(), {x, kNaN});
    return s;
  };
  const auto dlogprob = spread(d.dlogprob), dlse = spread(d.dlse), dentropy = spread(d.dentropy);
  for_each_backend([&](const std::string& backend) {
    for (const bool in_place : {false, true}) {
      const std::string where = what + ", " + name(p.dtype) + ", " + backend + (in_place ? ", in place" : "");
      Problem out = p;
      if (!in_place) out.spread_out(p.columns + 5, 3);
      const std::vector<unsigned char> before = out.memory;
      auto params = p.params<rlk::LogprobBackwardParams>();
      if (in_place) params.logits = out.address(0, 0);
      params.lse = saved.lse.data();
      params.entropy = saved.entropy.data();
      if (!dlogprob.empty()) params.dlogprob = dlogprob.data();
      if (!dlse.empty()) params.dlse = dlse.data();
      if (!dentropy.empty()) params.dentropy = dentropy.data();
      params.dlogprob_rows = params.dlse_rows = params.dentropy_rows = {p.rows, 0, 2};
      params.dlogits = out.address(0, 0);
      params.dlogits_rows = {p.rows, 0, out.stride};
      rlk::cpu::logprob_backward(params);
      std::vector<bool> written(out.memory.size(), false);
      for (std::int64_t i = 0; i < p.rows; ++i) {
        for (std::int64_t j = 0; j < p.columns; ++j) {
          std::uint32_t got = 0;
          std::memcpy(&got, out.address(i, j), static_cast<std::size_t>(p.size()));
          ASSERT_EQ(want[i * p.columns + j], got) << where << ", row " << i << ", column " << j;
          std::fill_n(written.begin() + (out.address(i, j) - out.memory.data()), p.size(), true);
        }
      }
      for (std::size_t k = 0; k < written.size(); ++k) {
        if (written[k]) continue;
        ASSERT_EQ(out.memory[k], before[k]) << where << ", byte " << k;
      }
    }
  });
}

std::vector<float> some_gradients(std::int64_t rows, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> d;
  for (std::int64_t i = 0; i < rows; ++i) d.push_back(std::normal_distribution<float>()(random));
  return d;
}

TEST_F(Logprob, BackwardHasTheBitsOfTheContract) {
  for (const std::int64_t V : {1, 7, 8, 15, 16, 17, 129, 1000, 4099, 40001}) {
    for (const DType dtype : kDtypes) {
      for (const Exp exp : kExps) {
        Problem p(V > 10000 ? 2 : 5, V, dtype, static_cast<unsigned>(V));
        p.exp = exp;
        const auto d1 = some_gradients(p.rows, 1), d2 = some_gradients(p.rows, 2), d3 = some_gradients(p.rows, 3);
        ASSERT_NO_FATAL_FAILURE(check_backward(p, {d1, {}, {}}, "dlogprob"));
        ASSERT_NO_FATAL_FAILURE(check_backward(p, {d1, d2, d3}, "all three"));
        if (V > 10000) continue;
        ASSERT_NO_FATAL_FAILURE(check_backward(p, {{}, d2, {}}, "dlse"));
        ASSERT_NO_FATAL_FAILURE(check_backward(p, {{}, {}, d3}, "dentropy"));
        ASSERT_NO_FATAL_FAILURE(check_backward(p, {{}, {}, {}}, "nothing"));
      }
    }
  }
}

TEST_F(Logprob, BackwardOfOddRows) {
  for (const DType dtype : kDtypes) {
    for (const Exp exp : kExps) {
      for (const float softcap : {0.0f, 15.0f}) {
        for (const float scale : {1.0f, 0.25f}) {
          Problem p(12, 600, dtype, 20, 8.0f);
          p.exp = exp;
          p.softcap = softcap;
          p.logit_scale = scale;
          p.valid_vocab = 590;
          Upstream d = {some_gradients(12, 4), some_gradients(12, 5), some_gradients(12, 6)};
          p.target[0] = kIgnore;
          p.target[1] = -3;  // NaN
          p.target[2] = 595;
          d.dlogprob[2] = 0.0f;  // what is left does not need the target
          d.dlogprob[3] = d.dlse[3] = d.dentropy[3] = 0.0f;
          p.set(3, 5, kNaN);  // unread
          p.set(4, 5, kNaN);
          p.set(5, 5, kInf);
          for (std::int64_t j = 100; j < 400; ++j) p.set(6, j, -kInf);
          p.target[6] = 200;  // masked label
          p.temperature[7] = -1.0f;
          p.keep(8, {1, 2, 3, 77});
          p.keep(9, {1, 2, 9999});                                                            // bad
          for (std::int64_t j = 0; j < 600; ++j) p.set(10, j, j % 5 == 0 ? -400.0f : -1.0f);  // below 2^-126
          for (std::int64_t j = 0; j < 600; ++j) p.set(11, j, -kInf);                         // empty
          ASSERT_NO_FATAL_FAILURE(check_backward(p, d, "odd rows, softcap " + std::to_string(softcap)));
          ASSERT_NO_FATAL_FAILURE(check_backward(p, {d.dlogprob, {}, {}}, "odd rows, dlogprob"));
        }
      }
    }
  }
}

TEST_F(Logprob, BackwardOfAShardIsThatOfTheWhole) {
  Problem p(4, 4099, DType::kBFloat16, 21);
  auto forward = p.params<rlk::LogprobParams>();
  Result saved(p.rows);
  saved.point(&forward);
  rlk::cpu::logprob(forward);
  const auto d = some_gradients(p.rows, 7);
  Problem whole = p, sharded = p;
  const auto run = [&](Problem* out, std::int64_t begin, std::int64_t end) {
    auto b = p.params<rlk::LogprobBackwardParams>();
    b.logits = p.address(0, begin);
    b.vocab_start = begin;
    b.num_columns = end - begin;
    b.lse = saved.lse.data();
    b.entropy = saved.entropy.data();
    b.dlogprob = b.dentropy = d.data();
    b.dlogprob_rows = b.dentropy_rows = {p.rows, 0, 1};
    b.dlogits = out->address(0, begin);
    b.dlogits_rows = {p.rows, 0, p.stride};
    rlk::cpu::logprob_backward(b);
  };
  run(&whole, 0, 4099);
  for (int s = 0; s < 4; ++s) run(&sharded, cut(4099, 2 * s), cut(4099, 2 * s + 2));
  EXPECT_EQ(whole.memory, sharded.memory);
}

TEST_F(Logprob, BackwardAgreesWithDouble) {
  for (const Exp exp : kExps) {
    Problem p(4, 5000, DType::kFloat32, 22);
    p.exp = exp;
    auto forward = p.params<rlk::LogprobParams>();
    Result saved(p.rows);
    saved.point(&forward);
    rlk::cpu::logprob(forward);
    const auto d1 = some_gradients(4, 8), d2 = some_gradients(4, 9), d3 = some_gradients(4, 10);
    Problem out = p;
    auto b = p.params<rlk::LogprobBackwardParams>();
    b.lse = saved.lse.data();
    b.entropy = saved.entropy.data();
    b.dlogprob = d1.data();
    b.dlse = d2.data();
    b.dentropy = d3.data();
    b.dlogprob_rows = b.dlse_rows = b.dentropy_rows = {4, 0, 1};
    b.dlogits = out.address(0, 0);
    b.dlogits_rows = {4, 0, p.stride};
    rlk::cpu::logprob_backward(b);
    for (std::int64_t i = 0; i < 4; ++i) {
      const double T = p.temperature[i];
      double largest = -kInf, sum = 0, magnitude = 0;
      for (std::int64_t j = 0; j < p.columns; ++j) largest = std::max(largest, p.at(i, j) / T);
      for (std::int64_t j = 0; j < p.columns; ++j) sum += std::exp(p.at(i, j) / T - largest);
      for (std::int64_t j = 0; j < p.columns; ++j) magnitude = std::max(magnitude, std::fabs(p.at(i, j) / T));
      const double lse = largest + std::log(sum);
      double entropy = 0;
      for (std::int64_t j = 0; j < p.columns; ++j) {
        const double l = p.at(i, j) / T - lse;
        entropy -= std::exp(l) * l;
      }
      for (std::int64_t j = 0; j < p.columns; ++j) {
        const double l = p.at(i, j) / T - lse, q = std::exp(l);
        const double exact = (d1[i] * ((j == p.target[i] ? 1.0 : 0.0) - q) + d2[i] * q - d3[i] * q * (l + entropy)) / T;
        // The relative error of p is the absolute one of log p.
        const double weight = (std::fabs(d1[i]) + std::fabs(d2[i]) + std::fabs(d3[i]) * (std::fabs(l) + entropy)) / T;
        // A p below 2^-126 is zero; at the target 1 - p is rounded, too.
        const double bound = weight * (q * (1e-5 + 4e-7 * magnitude) + 0x1p-126 + (j == p.target[i] ? 4e-7 : 0.0));
        ASSERT_NEAR(out.at(i, j), exact, bound) << i << ' ' << j;
      }
    }
  }
}

TEST_F(Logprob, GradientOfAConfidentTokenKeepsItsDigits) {
  // 1 - p of the target is 1e-5 and less: formed from a p rounded to fp32 it would be wrong by 2^-25 whatever its size.
  for (const Exp exp : kExps) {
    for (const float gap : {16.0f, 18.0f, 25.0f, 40.0f}) {
      Problem p(1, 100, DType::kFloat32, 23);
      p.exp = exp;
      p.temperature = {1.0f};
      p.target = {41};
      for (std::int64_t j = 0; j < 100; ++j) p.set(0, j, j == 41 ? 0.0f : -gap);
      const double others = 99 * std::exp(-static_cast<double>(gap));
      // The lse that a forward in double would have saved.
      const float lse = static_cast<float>(std::log1p(others)), d = 1.0f;
      Problem out = p;
      auto b = p.params<rlk::LogprobBackwardParams>();
      b.lse = &lse;
      b.dlogprob = &d;
      b.dlogits = out.address(0, 0);
      rlk::cpu::logprob_backward(b);
      const double exact = others / (1 + others);
      EXPECT_NEAR(out.at(0, 41), exact, 1e-6 * exact) << gap;

      // With the lse of our own forward what counts is the error of S near 1: two roundings, exp2_stat(0) is exact.
      auto forward = p.params<rlk::LogprobParams>();
      Result saved(1);
      saved.point(&forward);
      rlk::cpu::logprob(forward);
      b.lse = saved.lse.data();
      rlk::cpu::logprob_backward(b);
      EXPECT_NEAR(out.at(0, 41), exact, 0x1p-22) << gap;
      for (std::int64_t j = 0; j < 100; ++j) ASSERT_TRUE(std::isfinite(out.at(0, j)));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What a C++ caller may get wrong, and the machinery.
TEST_F(Logprob, EmptyCalls) {
  rlk::LogprobParams p;
  p.vocab_size = p.valid_vocab = 100;
  p.num_columns = 100;
  rlk::cpu::logprob(p);  // no rows
  rlk::LogprobBackwardParams b;
  rlk::cpu::logprob_backward(b);
  rlk::cpu::logprob_merge({});
  // A part of a tiny vocabulary has no columns.
  const std::int64_t target[] = {0, kIgnore};
  float stats[10];
  p.num_rows = 2;
  p.num_columns = 0;
  p.target = target;
  p.target_rows = {2, 0, 1};
  p.vocab_size = p.valid_vocab = 1;
  p.stats = stats;
  rlk::cpu::logprob(p);
  const float want[] = {-kInf, 0, 0, 0, kNaN, -kInf, 0, 0, 0, kInf};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(bits(stats[i]), bits(want[i])) << i;
}

TEST_F(Logprob, ShardsThatAreNotGroupsOfPartsAreRefused) {
  Problem p(1, 1024, DType::kFloat32, 24);
  float stats[5];
  const auto call = [&](std::int64_t start, std::int64_t columns) {
    auto params = p.params<rlk::LogprobParams>();
    params.vocab_start = start;
    params.num_columns = columns;
    params.stats = stats;
    rlk::cpu::logprob(params);
  };
  EXPECT_NO_THROW(call(0, 1024));
  EXPECT_NO_THROW(call(256, 256));
  EXPECT_THROW(call(128, 256), rlk::InvalidArgument);  // parts 1 and 2
  EXPECT_THROW(call(0, 384), rlk::InvalidArgument);    // three parts
  EXPECT_THROW(call(0, 1000), rlk::InvalidArgument);
  EXPECT_THROW(call(8, 1016), rlk::InvalidArgument);
  EXPECT_THROW(call(512, 1024), rlk::InvalidArgument);
  EXPECT_THROW(call(-128, 128), rlk::InvalidArgument);
  p.valid_vocab = 1000;
  EXPECT_NO_THROW(call(0, 1000));  // padding need not be in memory
  EXPECT_NO_THROW(call(512, 488));
}

TEST_F(Logprob, FlushToZeroOfTheCallerDecidesNothing) {
#if defined(__x86_64__)
  Problem p(3, 1500, DType::kFloat32, 25);
  for (std::int64_t j = 0; j < p.columns; ++j) p.set(0, j, static_cast<float>(j % 7) * 0x1p-140f);
  p.temperature[2] = 0x1p120f;
  for (std::int64_t j = 0; j < p.columns; ++j) p.set(2, j, static_cast<float>(j) * 0x1p-10f);
  std::vector<RowOutputs> want;
  for (std::int64_t i = 0; i < p.rows; ++i) want.push_back(reference(p, i));
  auto params = p.params<rlk::LogprobParams>();
  for (const int threads : {1, 3}) {
    rlk::cpu::set_num_threads(threads);
    Result got(p.rows);
    got.point(&params);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    rlk::cpu::logprob(params);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & 0xffc0u, (before | 0x8040u) & 0xffc0u);
    for (std::int64_t i = 0; i < p.rows; ++i) expect_row(want[i], got, i, "flush to zero");
  }
#endif
}

TEST_F(Logprob, CallsFromManyThreadsAtOnce) {
  rlk::cpu::set_num_threads(3);
  Problem p(5, 20011, DType::kBFloat16, 26);
  std::vector<RowOutputs> want;
  for (std::int64_t i = 0; i < p.rows; ++i) want.push_back(reference(p, i));
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t) {
    callers.emplace_back([&, t] {
      for (int k = 0; k < 20; ++k) {
        if (t == 5) rlk::cpu::set_num_threads(1 + k % 4);
        auto params = p.params<rlk::LogprobParams>();
        Result got(p.rows);
        got.point(&params);
        rlk::cpu::logprob(params);
        for (std::int64_t i = 0; i < p.rows; ++i) {
          if (bits(got.logprob[i]) != bits(want[i].logprob) || bits(got.entropy[i]) != bits(want[i].entropy)) ++wrong;
        }
      }
    });
  }
  for (auto& c : callers) c.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    rlk::cpu::set_num_threads(threads);
    for (const std::int64_t n : {0, 1, 2, 100, 1001}) {
      for (const std::int64_t grain : {0, 1, 7, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<std::size_t>(n));
        rlk::cpu::parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) ++seen[i];
        });
        for (const auto& s : seen) ASSERT_EQ(s, 1);
      }
    }
  }
}

TEST(ThreadPool, UsesItsThreads) {
  rlk::cpu::set_num_threads(2);
  std::atomic<int> inside{0};
  // Both ranges must be open at once for either to end.
  rlk::cpu::parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
    ++inside;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (inside < 2 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
    EXPECT_EQ(inside, 2);
  });
}

TEST(ThreadPool, NestedCallsRunInline) {
  rlk::cpu::set_num_threads(3);
  std::atomic<int> sum{0};
  rlk::cpu::parallel_for(8, 1, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    rlk::cpu::parallel_for(10, 1, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_EQ(self, std::this_thread::get_id());
      sum += static_cast<int>(end - begin);
    });
  });
  EXPECT_EQ(sum, 80);
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
  rlk::cpu::set_num_threads(3);
  for (int k = 0; k < 50; ++k) {
    EXPECT_THROW(rlk::cpu::parallel_for(100, 1,
                                        [&](std::int64_t begin, std::int64_t) {
                                          if (begin == k) throw std::runtime_error("this one");
                                        }),
                 std::runtime_error);
  }
  std::atomic<int> sum{0};
  rlk::cpu::parallel_for(100, 1, [&](std::int64_t, std::int64_t) { ++sum; });
  EXPECT_EQ(sum, 100);
  EXPECT_THROW(rlk::cpu::set_num_threads(0), rlk::InvalidArgument);
}

TEST(ThreadPool, AForkedChildHasThreadsOfItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads";
#endif
  rlk::cpu::set_num_threads(3);
  rlk::cpu::parallel_for(100, 1, [](std::int64_t, std::int64_t) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(10);
    std::atomic<int> sum{0};
    rlk::cpu::parallel_for(1000, 1, [&](std::int64_t, std::int64_t) { ++sum; });
    _exit(sum == 1000 && rlk::cpu::num_threads() == 3 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::atomic<int> sum{0};
  rlk::cpu::parallel_for(100, 1, [&](std::int64_t, std::int64_t) { ++sum; });
  EXPECT_EQ(sum, 100);
}

TEST(Isa, TheBaselineIsAlwaysThere) {
  EXPECT_TRUE(rlk::cpu::isa_supported(rlk::cpu::Isa::kBaseline));
  EXPECT_STREQ(rlk::cpu::isa_name(rlk::cpu::Isa::kAvx2), "avx2");
  for (const auto isa : rlk::cpu::kIsas) {
    if (rlk::cpu::isa_supported(isa)) {
      rlk::cpu::set_isa(isa);
      EXPECT_EQ(rlk::cpu::isa(), isa);
    } else {
      EXPECT_THROW(rlk::cpu::set_isa(isa), rlk::InvalidArgument);
    }
  }
}

}  // namespace
