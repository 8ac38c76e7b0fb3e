// Tests attention's partials and their merge bit for bit against a second implementation, written from the contract.
// The backend is the CPU or, with RLK_TEST_HIP, HIP.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "attention_reference.h"
#include "rlk/backends.h"

namespace attention_test {
namespace {

using linear_test::for_each_backend;
using rlk::Arithmetic;
using rlk::AttentionMergeParams;
using rlk::AttentionPartialsParams;

#if RLK_TEST_HIP
constexpr Exp kExps[] = {Exp::kPortable};
constexpr Arithmetic kArithmetics[] = {Arithmetic::kIeee};
void run(const AttentionPartialsParams& p) { rlk::hip::attention_partials(p, 0, 0); }
void run(const AttentionMergeParams& p) { rlk::hip::attention_merge(p, 0, 0); }
#else
constexpr Exp kExps[] = {Exp::kPortable, Exp::kHardware};
constexpr Arithmetic kArithmetics[] = {Arithmetic::kIeee, Arithmetic::kSm90};
void run(const AttentionPartialsParams& p) { rlk::cpu::attention_partials(p); }
void run(const AttentionMergeParams& p) { rlk::cpu::attention_merge(p); }
#endif

struct Partials {
  std::vector<float> stats, sums;
};

// Partials of splits [0, num_splits) by the contract.
Partials reference_partials(const AttentionParams& p, std::int64_t num_splits) {
  const std::int64_t rows = (p.cu_seqlens_q ? p.q_tokens : p.num_sequences * p.q_tokens) * p.num_q_heads;
  Partials r;
  r.sums.assign(static_cast<std::size_t>(num_splits * rows * p.value_dim), 0.0f);
  for (std::int64_t i = 0; i < num_splits * rows; ++i) r.stats.insert(r.stats.end(), {-kInf, 0.0f});
  for (std::int64_t b = 0; b < p.num_sequences; ++b) {
    const Sequence sequence(p, b);
    for (std::int64_t h = 0; h < p.num_q_heads; ++h) {
      const std::int64_t kv_head = h / (p.num_q_heads / p.num_kv_heads);
      std::vector<Row> keys, values;
      for (std::int64_t j = 0; j < sequence.keys; ++j) {
        keys.push_back(sequence.key(p.k, p.head_dim, j, kv_head));
        values.push_back(sequence.key(p.v, p.value_dim, j, kv_head));
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
        std::size_t begin = 0;
        for (std::int64_t s = 0; s < num_splits && begin < scores.size(); ++s) {
          const std::size_t end = std::min(begin + keys_of_split({}, begin), scores.size());
          const Sums split = split_of(p, scores, sees, values, begin, end, {});
          const bool seen = std::count(sees.begin() + static_cast<std::ptrdiff_t>(begin),
                                       sees.begin() + static_cast<std::ptrdiff_t>(end), true) != 0;
          begin = end;
          if (!seen) continue;
          const auto at = static_cast<std::size_t>(s * rows + sequence.place(i) * p.num_q_heads + h);
          r.stats[2 * at] = split.m;
          r.stats[2 * at + 1] = std::isnan(split.m) ? 0.0f : split.m == -kInf ? 1.0f : split.l;
          for (std::size_t d = 0; d < split.o.size(); ++d) {
            const bool contributes = split.m > -kInf;
            r.sums[at * split.o.size() + d] = contributes ? split.o[d] + 0.0f : 0.0f;
          }
        }
      }
    }
  }
  return r;
}

void expect(const std::vector<float>& got, const std::vector<float>& want, const std::string& where) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(rounded(got[i], DType::kFloat32), rounded(want[i], DType::kFloat32))
        << where << ", element " << i << ": wanted " << want[i] << ", got " << got[i];
    ASSERT_TRUE(!std::isnan(got[i]) || rlk::bits_of(got[i]) == 0x7fc00000) << where << ", element " << i;
  }
}

void check(const Case& c) {
  const Problem problem(c);
  const std::int64_t rows = problem.q_places();
  for (const Arithmetic arithmetic : kArithmetics) {
    if (arithmetic != Arithmetic::kIeee && c.dtype == DType::kFloat32) continue;
    AttentionParams whole{problem.input};
    whole.sinks = nullptr;
    whole.arithmetic = arithmetic;
    const std::int64_t splits = rlk::attention_splits(whole.k_tokens);
    const Partials want = reference_partials(whole, splits);
    AttentionParams with_sinks = whole;
    with_sinks.sinks = problem.input.sinks;
    const ForwardPatterns merged = reference(with_sinks);
    for_each_backend([&](const std::string& backend) {
      const std::string where = c.text() + ", " + linear_test::name(arithmetic) + ", " + backend;
      Partials got{std::vector<float>(want.stats.size(), 7.0f), std::vector<float>(want.sums.size(), 7.0f)};
      // Two runs of splits.
      for (const auto& [first, count] : {std::pair{std::int64_t{0}, splits / 2}, {splits / 2, splits - splits / 2}}) {
        if (count == 0) continue;
        AttentionPartialsParams p{whole};
        p.first_split = first;
        p.num_splits = count;
        p.stats = got.stats.data() + 2 * first * rows;
        p.sums = got.sums.data() + first * rows * p.value_dim;
        run(p);
      }
      ASSERT_NO_FATAL_FAILURE(expect(got.stats, want.stats, where + ", stats"));
      ASSERT_NO_FATAL_FAILURE(expect(got.sums, want.sums, where + ", sums"));
      AttentionMergeParams m;
      m.stats = got.stats.data();
      m.sums = got.sums.data();
      m.sinks = with_sinks.sinks;
      m.num_splits = splits;
      m.q_tokens = whole.q_tokens;
      m.rows = rows / std::max<std::int64_t>(whole.num_q_heads, 1);
      m.num_q_heads = whole.num_q_heads;
      m.value_dim = whole.value_dim;
      m.dtype = whole.dtype;
      m.exp = whole.exp;
      std::iota(m.order, m.order + splits, std::int16_t{0});
      std::vector<unsigned char> out(merged.out.size() * static_cast<std::size_t>(rlk::size_of(c.dtype)), 0x5a);
      std::vector<float> lse(merged.lse.size(), 7.0f);
      m.out = out.data();
      m.lse = lse.data();
      run(m);
      for (std::size_t i = 0; i < merged.out.size(); ++i) {
        ASSERT_EQ(load_pattern(out.data(), c.dtype, static_cast<std::int64_t>(i)), merged.out[i])
            << where << ", out " << i;
      }
      for (std::size_t i = 0; i < merged.lse.size(); ++i) {
        ASSERT_EQ(rounded(lse[i], DType::kFloat32), merged.lse[i]) << where << ", lse " << i;
      }
    });
  }
}

class AttentionPartials : public linear_test::Linear {};

// Rows see splits wholly, in part and not at all. The cases have sinks, softcaps, windows, values that are not finite,
// and both block widths.
TEST_F(AttentionPartials, HaveTheBitsOfTheContractAndMergeToThoseOfOneCall) {
  unsigned seed = 300;
  for (const Form form : {Form::kPacked, Form::kPadded, Form::kLeftPadded, Form::kPaged}) {
    for (const Data data : {Data::kNormal, Data::kSpecial, Data::kWide}) {
      Case c{{{2, 2100}, {5, 40}, {3, 1}}};
      c.k_form = form;
      c.data = data;
      c.dtype = seed % 3 == 0 ? DType::kFloat32 : seed % 3 == 1 ? DType::kBFloat16 : DType::kFloat16;
      c.head_dim = seed % 4 == 1 ? 136 : 16;
      c.value_dim = seed % 4 == 3 ? 8 : 0;
      c.exp = kExps[seed % std::size(kExps)];
      c.sinks = seed % 2 == 0;
      c.softcap = seed % 5 == 0 ? 3.0f : 0.0f;
      c.window = seed % 3 == 2 ? 1100 : 0;
      c.causal = c.window > 0 || seed % 7 != 0;
      c.seed = ++seed;
      ASSERT_NO_FATAL_FAILURE(check(c));
    }
  }
}

}  // namespace
}  // namespace attention_test
