// Tests gae, discounted_returns and vtrace bit for bit against a second implementation, written from the contract. The
// backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gae_reference.h"
#include "linear_backend.h"
#include "rlk/backends.h"
#include "rlk/ops/gae.h"

namespace gae_test {
namespace {

using linear_test::for_each_backend;
using rlk::DType;

#if RLK_TEST_HIP
void run(const GaeParams& p) { rlk::hip::gae(p, 0, 0); }
#else
void run(const GaeParams& p) { rlk::cpu::gae(p); }
#endif

constexpr float kCanary = -12345.0f;
constexpr std::int64_t kGuard = 16;

struct Case {
  std::vector<std::int64_t> lengths;
  GaeKind kind = GaeKind::kGae;
  bool packed = false;
  std::int64_t shift = 0;  // elements by which every array is off alignment
  std::int64_t pad = 0;    // elements between rows
  DType mask_dtype = DType::kBool;
  bool has_mask = true, reset = false, bootstrap = false, special = false;
  double share = 0.8;  // share of tokens that count
  float gamma = 0.99f, lam = 0.95f;
  unsigned seed = 1;

  std::string text() const {
    std::string all = "kind " + std::to_string(static_cast<int>(kind)) + (packed ? ", packed" : "") +
                      (special ? ", special" : "") + ", shift " + std::to_string(shift) + ", lengths";
    for (std::int64_t n : lengths) all += " " + std::to_string(n);
    return all;
  }
};

std::uint32_t bits(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

class Call {
 public:
  explicit Call(const Case& c) : case_(c), random_(c.seed) {
    const std::int64_t num = static_cast<std::int64_t>(c.lengths.size());
    std::int64_t longest = 0, total = 0;
    for (std::int64_t n : c.lengths) {
      starts_.push_back(total);
      longest = std::max(longest, n);
      total += n;
    }
    starts_.push_back(total);
    stride_ = c.packed ? 0 : longest + c.pad;
    size_ = c.shift + kGuard + (c.packed ? total : num * stride_) + kGuard;
    p.kind = c.kind;
    p.sequences.num_sequences = num;
    p.sequences.num_tokens = c.packed ? total : longest;
    p.gamma = c.gamma;
    p.lam = c.lam;
    p.rho_bar = 1.2f;
    p.rollout_neutral = random_() % 2 == 0;
    p.c_bar = 1.1f;
    p.reset = c.reset;
    for (auto* a : {&rewards_, &values_, &logprob_, &rollout_}) a->assign(size_, kCanary);
    advantages_.assign(size_, kCanary);
    returns_.assign(size_, kCanary);
    mask_.assign(size_ * 8, 0);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < num; ++i) {
      boots_.push_back(c.bootstrap ? normal(random_) : 0.0f);
      std::vector<Token> tokens;
      for (std::int64_t t = 0; t < (c.packed ? c.lengths[i] : longest); ++t) {
        Token token;
        token.counts = !c.has_mask || (t < c.lengths[i] && random_() % 1000 < 1000 * c.share);
        token.reward = number(&normal, token.counts);
        token.value = number(&normal, token.counts);
        token.logprob = number(&normal, token.counts);
        token.rollout_logprob = number(&normal, token.counts);
        if (p.rollout_neutral && random_() % 16 == 0) token.rollout_logprob = NAN;
        const std::int64_t at = offset(i) + t;
        rewards_[at] = token.reward;
        values_[at] = token.value;
        logprob_[at] = token.logprob;
        rollout_[at] = token.rollout_logprob;
        set_mask(at, token.counts);
        tokens.push_back(token);
      }
      tokens_.push_back(tokens);
    }
    p.rewards = {rewards_.data() + c.shift, stride_};
    p.values = {values_.data() + c.shift, stride_};
    p.logprob = {logprob_.data() + c.shift, stride_};
    p.rollout_logprob = {rollout_.data() + c.shift, stride_};
    p.advantages = {advantages_.data() + c.shift, stride_};
    p.returns = {returns_.data() + c.shift, stride_};
    if (c.has_mask) p.mask = rlk::mask_of(mask_.data() + c.shift * rlk::size_of(c.mask_dtype), stride_, c.mask_dtype);
    if (c.bootstrap) p.bootstrap = boots_.data();
    if (c.packed) {
      p.sequences.cu_seqlens = starts_.data();
      p.sequences.cu_dtype = DType::kInt64;
    }
  }

  // Masked tokens hold NaN, which must not reach any output.
  void expect_contract(const std::string& where) {
    run(p);
    std::vector<float> advantages(size_, kCanary), returns(size_, kCanary);
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      const Outputs want = reference(p, tokens_[i], boots_[i]);
      const std::int64_t at = offset(static_cast<std::int64_t>(i));
      for (std::size_t t = 0; t < want.returns.size(); ++t) returns[at + t] = want.returns[t];
      for (std::size_t t = 0; t < want.advantages.size(); ++t) advantages[at + t] = want.advantages[t];
    }
    for (std::int64_t i = 0; i < size_; ++i) {
      ASSERT_EQ(bits(returns[i]), bits(returns_[i]))
          << where << case_.text() << ": returns at " << i << ", wanted " << returns[i] << ", got " << returns_[i];
      ASSERT_EQ(bits(advantages[i]), bits(advantages_[i]))
          << where << case_.text() << ": advantages at " << i << ", wanted " << advantages[i] << ", got "
          << advantages_[i];
    }
  }

  // Returns of one sequence.
  std::vector<float> returns(std::int64_t i) const {
    return {returns_.begin() + offset(i), returns_.begin() + offset(i) + case_.lengths[i]};
  }
  std::vector<float> advantages(std::int64_t i) const {
    return {advantages_.begin() + offset(i), advantages_.begin() + offset(i) + case_.lengths[i]};
  }

  GaeParams p;

 private:
  std::int64_t offset(std::int64_t i) const { return case_.shift + (case_.packed ? starts_[i] : i * stride_); }
  float number(std::normal_distribution<float>* normal, bool counts) {
    if (!counts) return std::numeric_limits<float>::quiet_NaN();
    constexpr float kValues[] = {0.0f, -0.0f, 1e-38f, -1e-44f, 1e30f, -3e38f, INFINITY, -INFINITY, NAN};
    if (case_.special && random_() % 64 == 0) return kValues[random_() % 9];
    return (*normal)(random_);
  }
  void set_mask(std::int64_t at, bool counts) {
    const std::int64_t one = counts ? 1 : 0;
    const float real = counts ? 1.0f : at % 2 == 0 ? -0.0f : 0.0f;
    const int bytes = rlk::size_of(case_.mask_dtype);
    std::memcpy(&mask_[static_cast<std::size_t>(at * bytes)],
                case_.mask_dtype == DType::kFloat32 ? static_cast<const void*>(&real) : &one,
                static_cast<std::size_t>(bytes));
  }

  Case case_;
  std::mt19937 random_;
  std::int64_t stride_ = 0, size_ = 0;
  std::vector<std::int64_t> starts_;
  std::vector<float> rewards_, values_, logprob_, rollout_, advantages_, returns_, boots_;
  std::vector<unsigned char> mask_;
  std::vector<std::vector<Token>> tokens_;
};

constexpr GaeKind kKinds[] = {GaeKind::kGae, GaeKind::kDiscountedReturns, GaeKind::kVtrace};

// Lengths: one token; a lane's tokens and one more; around a chunk; several chunks; more chunks than a block has teams.
const std::vector<std::int64_t> kLengths = {1, 4, 5, 127, 128, 129, 700, 2100};

TEST(Gae, EveryOutputHasTheBitsOfTheContract) {
  for_each_backend([](const std::string& where) {
    unsigned seed = 0;
    for (const GaeKind kind : kKinds) {
      for (const bool packed : {false, true}) {
        for (const bool special : {false, true}) {
          Case c{{0, 3, 1, 130, 0, 4, 517, 128}, kind, packed};
          c.special = special;
          c.seed = ++seed;
          c.bootstrap = kind != GaeKind::kDiscountedReturns && special;
          c.reset = kind == GaeKind::kDiscountedReturns && special;
          Call(c).expect_contract(where);
        }
      }
    }
  });
}

TEST(Gae, AnyLengthMaskAndAlignment) {
  for_each_backend([](const std::string& where) {
    unsigned seed = 100;
    constexpr DType kMasks[] = {DType::kBool, DType::kInt32, DType::kInt64, DType::kFloat32};
    for (const std::int64_t length : kLengths) {
      for (const GaeKind kind : kKinds) {
        Case c{{length, length / 2}, kind};
        c.seed = ++seed;
        c.mask_dtype = kMasks[seed % 4];
        c.shift = seed % 5;
        c.pad = seed % 3 == 0 ? 0 : 4 - length % 4;
        c.share = seed % 4 == 0 ? 0.1 : 0.9;
        c.has_mask = seed % 7 != 0;
        c.packed = seed % 2 == 0;
        c.reset = kind == GaeKind::kDiscountedReturns && seed % 3 == 1;
        Call(c).expect_contract(where);
      }
    }
  });
}

TEST(Gae, CoefficientsAtTheEndsOfTheirRange) {
  for_each_backend([](const std::string& where) {
    constexpr float kCoefficients[] = {0.0f, -0.0f, 1e-30f, 1.0f};
    for (const GaeKind kind : kKinds) {
      for (const float gamma : kCoefficients) {
        for (const float lam : kCoefficients) {
          Case c{{300}, kind};
          c.gamma = gamma;
          c.lam = lam;
          c.special = true;
          Call(c).expect_contract(where);
        }
      }
    }
  });
}

TEST(Gae, PackedIsPadded) {
  for (const GaeKind kind : kKinds) {
    for (const bool reset : {false, true}) {
      Case c{{5, 0, 128, 300, 77}, kind};
      c.reset = reset && kind == GaeKind::kDiscountedReturns;
      c.has_mask = true;
      c.share = 1.0;
      Call padded(c);
      run(padded.p);
      // Writes the tokens of the rows in order.
      for (std::size_t i = 0; i < c.lengths.size(); ++i) {
        if (c.lengths[i] == 0) continue;
        const std::int64_t row = static_cast<std::int64_t>(i);
        std::vector<float> returns(static_cast<std::size_t>(c.lengths[i])), advantages = returns;
        GaeParams p = padded.p;
        const std::int32_t ends[] = {0, static_cast<std::int32_t>(c.lengths[i])};
        p.sequences = {ends, DType::kInt32, 1, c.lengths[i]};
        for (auto* a : {&p.rewards, &p.values, &p.logprob, &p.rollout_logprob}) {
          a->data += row * a->row_stride;
          a->row_stride = 0;
        }
        p.mask = {};
        p.returns = {returns.data(), 0};
        p.advantages = {advantages.data(), 0};
        run(p);
        const std::vector<float> want = padded.returns(row), of = padded.advantages(row);
        EXPECT_EQ(std::memcmp(returns.data(), want.data(), returns.size() * 4), 0);
        if (kind != GaeKind::kDiscountedReturns) {
          EXPECT_EQ(std::memcmp(advantages.data(), of.data(), advantages.size() * 4), 0);
        }
      }
    }
  }
}

TEST(Gae, AWhollyMaskedSequenceGivesZerosAndTheBootstrap) {
  Case c{{200}, GaeKind::kGae};
  c.share = 0.0;
  c.bootstrap = true;
  Call call(c);
  run(call.p);
  for (const float a : call.advantages(0)) EXPECT_EQ(bits(a), bits(0.0f));
  for (const float r : call.returns(0)) EXPECT_EQ(r, call.p.bootstrap[0]);
}

TEST(Gae, EmptyCallsTouchNothing) {
  GaeParams p;
  run(p);
  p.sequences.num_sequences = 3;
  run(p);
}

#if !RLK_TEST_HIP
TEST(Gae, OffsetsOutOfOrderAreRefusedBeforeAnythingIsWritten) {
  const std::vector<std::vector<std::int64_t>> wrong = {{1, 5, 10}, {0, 6, 5}, {0, 5, 11}, {0, -1, 10}};
  for (const auto& offsets : wrong) {
    Case c{{5, 5}, GaeKind::kGae, true};
    Call call(c);
    call.p.sequences.cu_seqlens = offsets.data();
    call.p.sequences.cu_dtype = DType::kInt64;
    EXPECT_THROW(run(call.p), rlk::InvalidArgument);
    for (const float r : call.returns(0)) EXPECT_EQ(r, kCanary);
  }
}
#else
TEST(Gae, OffsetsOutOfOrderTouchNothingOutsideOfTheArrays) {
  const std::vector<std::vector<std::int64_t>> wrong = {{-7, 5, 1000}, {4, 2, 3}, {20, 30, -1}};
  for (const auto& offsets : wrong) {
    Case c{{5, 5}, GaeKind::kGae, true};
    Call call(c);
    call.p.sequences.cu_seqlens = offsets.data();
    call.p.sequences.cu_dtype = DType::kInt64;
    run(call.p);
  }
}
#endif

}  // namespace
}  // namespace gae_test
