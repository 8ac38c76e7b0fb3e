// Tests products of attention in the arithmetic of sm_90's matrix unit, on the CPU, forward and backward. Rule 1 is
// compared with a second implementation, written from the contract, for shapes of models. Every chunk has the same
// bytes, and plain chains do not change.
#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_reference.h"
#include "rlk/backends.h"
#include "rlk/math/mma_model.h"
#include "rlk/ops/attention.h"

namespace attention_test {
namespace {

using rlk::Arithmetic;

constexpr DType kHalves[] = {DType::kBFloat16, DType::kFloat16};

Patterns patterns_of(const std::vector<unsigned char>& memory, DType t) {
  Patterns found;
  const std::size_t count = memory.size() / static_cast<std::size_t>(rlk::size_of(t));
  for (std::size_t i = 0; i < count; ++i) {
    found.push_back(load_pattern(memory.data(), t, static_cast<std::int64_t>(i)));
  }
  return found;
}

ForwardPatterns computed(AttentionParams p, std::int64_t rows) {
  std::vector<unsigned char> out(static_cast<std::size_t>(rows * p.value_dim * rlk::size_of(p.dtype)), 0x5a);
  std::vector<unsigned char> lse(static_cast<std::size_t>(rows) * 4, 0x5a);
  p.out = out.data();
  p.lse = reinterpret_cast<float*>(lse.data());
  rlk::cpu::attention(p);
  return {patterns_of(out, p.dtype), patterns_of(lse, DType::kFloat32)};
}

AttentionParams on_sm_90(const Problem& problem) {
  AttentionParams p{problem.input};
  p.arithmetic = Arithmetic::kSm90;
  return p;
}

class AttentionMma : public linear_test::Linear {};

void check(const Case& c) {
  const Problem problem(c);
  const AttentionParams p = on_sm_90(problem);
  const ForwardPatterns want = reference(p);
  linear_test::for_each_backend([&](const std::string& backend) {
    const ForwardPatterns got = computed(p, problem.q_places());
    ASSERT_EQ(got.out, want.out) << c.text() << ", " << backend;
    ASSERT_EQ(got.lse, want.lse) << c.text() << ", " << backend;
  });
}

// Widths come from models, and one width is no multiple of 16. The cases have several blocks of keys. Cases are decode,
// a chunk, a window, sequences shorter than a step and grouped heads; packed, padded on either side, and paged.
TEST_F(AttentionMma, ShapesOfModelsHaveTheBitsOfRule1) {
  unsigned seed = 300;
  for (const DType dtype : kHalves) {
    for (const std::int64_t head_dim : {40, 64, 128, 192}) {
      for (const std::int64_t window : {0, 50}) {
        for (const Form form : {Form::kPacked, Form::kPadded, Form::kLeftPadded, Form::kPaged}) {
          Case c{{{3, 3}, {1, 17}, {21, 150}, {1, 270}}};
          c.q_form = form == Form::kPaged || form == Form::kLeftPadded ? Form::kPacked : form;
          c.k_form = form;
          c.head_dim = head_dim;
          c.value_dim = head_dim == 192 && form != Form::kPacked ? 128 : 0;
          c.dtype = dtype;
          c.q_heads = 4;
          c.kv_heads = 2;
          c.window = window;
          c.softcap = form == Form::kPadded || form == Form::kPaged ? 2.0f : 0.0f;
          c.sinks = form == Form::kPadded || form == Form::kLeftPadded;
          c.exp = seed % 2 == 0 ? Exp::kHardware : Exp::kPortable;
          c.seed = ++seed;
          ASSERT_NO_FATAL_FAILURE(check(c));
        }
      }
    }
  }
}

// Computes a call's gradients on the CPU from the outputs of its forward.
struct BackwardCall {
  explicit BackwardCall(Problem& problem) : p{on_sm_90(problem)} {
    const Case& c = problem.what();
    const ForwardPatterns forward = computed(on_sm_90(problem), problem.q_places());
    for (const auto x : forward.out) {
      out.push_back(static_cast<unsigned char>(x));
      out.push_back(static_cast<unsigned char>(x >> 8));
    }
    for (const auto x : forward.lse) lse.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(x)));
    p.out = {out.data(), p.q_tokens * c.q_heads * c.values(), c.q_heads * c.values(), c.values()};
    p.dout = problem.like_out();
    p.lse = lse.data();
    for (std::size_t i = 0; i < lse.size(); ++i)
      dlse.push_back(static_cast<float>(static_cast<int>(i * 37 % 11) - 5) / 8);
    p.dlse = dlse.data();
    workspace.resize(lse.size() + 1);
    p.workspace = workspace.data();
    dq.assign(static_cast<std::size_t>(problem.q_places() * c.head_dim * 2), 0x5a);
    dk.assign(static_cast<std::size_t>(problem.k_places() * c.head_dim * 2), 0x5a);
    dv.assign(static_cast<std::size_t>(problem.k_places() * c.values() * 2), 0x5a);
    p.dq = dq.data();
    p.dk = dk.data();
    p.dv = dv.data();
  }
  BackwardPatterns computed_gradients() {
    rlk::cpu::attention_backward(p);
    return {patterns_of(dq, p.dtype), patterns_of(dk, p.dtype), patterns_of(dv, p.dtype)};
  }

  AttentionBackwardParams p;
  std::vector<unsigned char> out, dq, dk, dv;
  std::vector<float> lse, dlse, workspace;
};

// Steps of 16 queries are counted from the query at key 0, even if keys precede query 0. Both block widths occur.
TEST_F(AttentionMma, GradientsHaveTheBitsOfRule1) {
  unsigned seed = 500;
  bool decides = false;  // whether the unit's arithmetic changes a bit
  for (const DType dtype : kHalves) {
    for (const std::int64_t head_dim : {40, 64, 192}) {
      for (const std::int64_t window : {0, 50}) {
        for (const Form form : {Form::kPacked, Form::kPadded, Form::kLeftPadded}) {
          Case c{{{3, 3}, {1, 17}, {5, 135}, {40, 45}, {7, 3}}};
          c.softcap = form == Form::kPadded ? 2.0f : 0.0f;
          c.q_form = form == Form::kLeftPadded ? Form::kPacked : form;
          c.k_form = form;
          c.head_dim = head_dim;
          c.value_dim = head_dim == 192 && form != Form::kPacked ? 128 : 0;
          c.dtype = dtype;
          c.q_heads = 2;
          c.causal = seed % 3 != 0 || window != 0;
          c.window = window;
          c.exp = seed % 2 == 0 ? Exp::kHardware : Exp::kPortable;
          c.seed = ++seed;
          Problem problem(c);
          BackwardCall call(problem);
          const BackwardPatterns want = reference(call.p);
          linear_test::for_each_backend([&](const std::string& backend) {
            const BackwardPatterns got = call.computed_gradients();
            ASSERT_EQ(got.dq, want.dq) << c.text() << ", " << backend;
            ASSERT_EQ(got.dk, want.dk) << c.text() << ", " << backend;
            ASSERT_EQ(got.dv, want.dv) << c.text() << ", " << backend;
          });
          call.p.arithmetic = Arithmetic::kIeee;
          decides |= call.computed_gradients().dk != want.dk;
        }
      }
    }
  }
  EXPECT_TRUE(decides);
}

// An Inf or NaN among the values in use reaches every row that sees a key of its block, however rows are split into
// tasks. The NaN reaches no row that sees no key of the block. Pages that no query sees may be invalid.
TEST_F(AttentionMma, ValuesThatAreNotFiniteReachTheRowsOfTheirBlock) {
  for (const DType dtype : kHalves) {
    for (const std::int64_t window : {0, 3, 40}) {
      Case c{{{200, 390}, {1, 300}}};
      c.dtype = dtype;
      c.window = window;
      c.data = Data::kSpecial;
      c.k_form = Form::kPaged;
      c.seed = static_cast<unsigned>(400 + window);
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
  Case c{{{1, 300}}};
  c.window = 40;
  c.k_form = Form::kPaged;
  const Problem problem(c);
  AttentionParams p = on_sm_90(problem);
  const ForwardPatterns want = computed(p, problem.q_places());
  std::vector<std::int32_t> table(p.block_table, p.block_table + p.table_stride);
  for (std::int64_t i = 0; i < 260 / p.page_size; ++i) table[static_cast<std::size_t>(i)] = -1;
  p.block_table = table.data();
  EXPECT_EQ(computed(p, problem.q_places()).out, want.out);
  EXPECT_EQ(reference(p).out, want.out);
}

// On the CPU a gradient multiplies only the steps of 16 in which its token sees something. A GPU's tiles multiply at
// least those steps. A GPU may therefore have NaN where the CPU has a number, and has NaN wherever the CPU has NaN.
TEST_F(AttentionMma, GradientsTakeTheStepsThatTheirTokenSees) {
  constexpr std::int64_t kBad = 20;  // a token in use, as key and as query
  for (const bool bad_query : {false, true}) {
    Case c{{{70, 70}}};
    c.kv_heads = 2;
    c.head_dim = 64;
    Problem problem(c);
    BackwardCall call(problem);
    const BackwardPatterns clean = call.computed_gradients();
    // An infinite dout makes ds NaN where its row sees a key. Where the row does not see the key, dv's product is 0 *
    // Inf.
    const AttentionHeads& bad = bad_query ? call.p.dout : call.p.k;
    auto* row = const_cast<std::uint16_t*>(static_cast<const std::uint16_t*>(bad.data)) + kBad * bad.token_stride;
    for (std::int64_t d = 0; d < c.q_heads * c.head_dim; ++d) row[d] = 0x7f80;
    const BackwardPatterns got = call.computed_gradients();
    const Patterns &x = bad_query ? got.dv : got.dq, &y = bad_query ? clean.dv : clean.dq;
    for (std::int64_t token = 0; token < 70; ++token) {
      const bool reached = bad_query ? token < 32 : token >= 16;  // within the step of the bad token: 16 to 31
      for (std::int64_t i = token * 128; i < (token + 1) * 128; ++i) {
        if (reached) {
          EXPECT_EQ(x[i] & 0x7f80, 0x7f80u) << token;
        } else {
          EXPECT_EQ(x[i], y[i]) << token;
        }
      }
    }
  }
}

// Eight heads, with every cut of the queries; each chunk sees the keys that a cache then holds.
TEST_F(AttentionMma, EveryChunkHasTheBitsOfTheWhole) {
  Case c{{{300, 400}}};
  c.q_heads = 8;
  c.kv_heads = 2;
  c.head_dim = 64;
  c.exp = Exp::kHardware;
  const Problem problem(c);
  const AttentionParams p = on_sm_90(problem);
  const ForwardPatterns whole = computed(p, problem.q_places()), want = reference(p);
  ASSERT_EQ(whole.out, want.out);
  ASSERT_EQ(whole.lse, want.lse);
  const std::int64_t row = c.q_heads * c.head_dim;
  for (const auto& [first, last] : {std::pair{0, 100}, {100, 229}, {229, 300}, {27, 28}, {28, 29}, {299, 300}}) {
    AttentionParams part = p;
    const std::int32_t queries[] = {0, last - first}, keys[] = {0, last + 100};
    part.q.data = static_cast<const unsigned char*>(p.q.data) + first * row * 2;
    part.q_tokens = last - first;
    part.k_tokens = last + 100;
    part.cu_seqlens_q = queries;
    part.cu_seqlens_k = keys;
    const Patterns expected(whole.out.begin() + first * row, whole.out.begin() + last * row);
    EXPECT_EQ(computed(part, part.q_tokens * c.q_heads).out, expected) << first << " to " << last;
  }
}

TEST_F(AttentionMma, Float32AndOtherArithmeticsKeepTheirChains) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Case c{{{40, 40}}};
    c.dtype = dtype;
    c.head_dim = 64;
    const Problem problem(c);
    AttentionParams p{problem.input};
    const Patterns plain = computed(p, problem.q_places()).lse;
    for (const Arithmetic a : linear_test::kArithmetics) {
      p.arithmetic = a;
      const bool by_unit = a == Arithmetic::kSm90 && dtype != DType::kFloat32;
      EXPECT_EQ(computed(p, problem.q_places()).lse != plain, by_unit)
          << linear_test::name(dtype) << " as " << linear_test::name(a);
    }
  }
}

// A kernel may leave out a step of 16 keys if the row sees none of them. Products of finite values with zeros do not
// align, and leave any accumulator but -0 unchanged.
TEST(Sm90Mma, AStepOfZeroWeightsChangesNoAccumulator) {
  std::mt19937 random(7);
  for (const DType dtype : kHalves) {
    const std::uint16_t infinity = dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00;
    for (int i = 0; i < 200000; ++i) {
      std::uint16_t weights[16] = {}, values[16];
      for (std::uint16_t& v : values) {
        do v = static_cast<std::uint16_t>(random());
        while ((v & 0x7fff) >= infinity);
      }
      std::uint32_t sum = random();
      if (i % 4 == 0) sum &= 0x807fffff;  // subnormal
      if (i % 4 == 1) sum = (sum & 0x80000000) | 0x7f800000;
      if (sum == 0x80000000 || (sum & 0x7fffffff) > 0x7f800000) continue;
      const float got = rlk::mma_step<rlk::MmaUnit::kSm90>(std::bit_cast<float>(sum), weights, values, dtype);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(got), sum);
    }
  }
}

}  // namespace
}  // namespace attention_test
