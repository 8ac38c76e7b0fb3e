// Tests logprob's backward on the CPU, bit for bit against a second implementation written from docs/numerics.md, and
// within its bounds against double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "logprob_backend.h"
#include "logprob_reference.h"
#include "rlk/math/exp2.h"
#include "rlk/math/expm1.h"
#include "rlk/math/half.h"
#include "rlk/math/log2.h"
#include "rlk/math/mufu_model.h"
#include "rlk/ops/logprob.h"

namespace logprob_test {
namespace {

struct Upstream {
  std::vector<float> dlogprob, dlse, dentropy;
};

float backward_reference(const Problem& p, std::int64_t row, std::int64_t j, const Upstream& d, float lse,
                         float entropy) {
  const auto value = [&](const std::vector<float>& v) { return v.empty() ? 0.0f : v[row]; };
  float dlogprob = value(d.dlogprob), dlse = value(d.dlse), dentropy = value(d.dentropy), of_mean = 0.0f;
  const std::int64_t y = p.target[row];
  if (y == kIgnore || (dlogprob == 0 && dlse == 0 && dentropy == 0)) return 0.0f;
  bool bad = false;
  const auto kept = kept_of(p, row, &bad);
  if (j >= p.valid_vocab || (kept && !(*kept)[j])) return 0.0f;
  const float T = p.temperature[row];
  const bool bad_target = y < 0 || y >= p.valid_vocab;
  if (const float e = p.label_smoothing; e != 0.0f) {
    of_mean = e * dlogprob * (p.logit_scale / T) / static_cast<float>(p.valid_vocab);
    dlse = std::fmaf(-e, dlogprob, dlse);
    dlogprob = (1.0f - e) * dlogprob;
  }
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
  float through_one = -g * rlk::expm1(rlk::kLn2 * t);
  if (of_mean != 0.0f) through_one += of_mean;
  float dz =
      j == y ? std::fmaf(p_j, std::fmaf(b, low, a), through_one) : std::fmaf(p_j, std::fmaf(b, low, a - g), of_mean);
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
  forward.label_smoothing = 0.0f;  // lse and entropy do not depend on it
  Result saved(p.rows);
  saved.point(&forward);
  run(forward);
  std::vector<std::uint32_t> want;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    for (std::int64_t j = 0; j < p.columns; ++j) {
      want.push_back(stored_bits(p.dtype, backward_reference(p, i, j, d, saved.lse[i], saved.entropy[i])));
    }
  }
  // Incoming gradients are two elements apart.
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
      if (!in_place) out.spread_out(p.columns + 5, kWholeElements ? 4 : 3);
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
      run_backward(params);
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

TEST_F(Logprob, BackwardOfSmoothedRows) {
  for (const std::int64_t V : {1, 9, 17, 1000}) {
    for (const DType dtype : kDtypes) {
      for (const Exp exp : kExps) {
        for (const float softcap : {0.0f, 15.0f}) {
          Problem p(6, V, dtype, static_cast<unsigned>(V) + 1);
          p.exp = exp;
          p.label_smoothing = 0.2f;
          p.softcap = softcap;
          p.valid_vocab = V - V / 50;
          p.target[0] = kIgnore;
          p.target[1] = -3;
          for (std::size_t i = 2; i < 6; ++i) p.target[i] %= p.valid_vocab;
          auto d1 = some_gradients(p.rows, 1);
          const auto d2 = some_gradients(p.rows, 2);
          d1[4] = 0.0f;
          p.set(5, V - 1, -kInf);
          ASSERT_NO_FATAL_FAILURE(check_backward(p, {d1, {}, {}}, "smoothed, dlogprob"));
          ASSERT_NO_FATAL_FAILURE(check_backward(p, {d1, d2, {}}, "smoothed, dlogprob and dlse"));
        }
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
          d.dlogprob[2] = 0.0f;  // the remaining gradients do not need the target
          d.dlogprob[3] = d.dlse[3] = d.dentropy[3] = 0.0f;
          p.set(3, 5, kNaN);  // not read
          p.set(4, 5, kNaN);
          p.set(5, 5, kInf);
          for (std::int64_t j = 100; j < 400; ++j) p.set(6, j, -kInf);
          p.target[6] = 200;  // a masked label
          p.temperature[7] = -1.0f;
          p.keep(8, {1, 2, 3, 77});
          p.keep(9, {1, 2, 9999});                                                            // an id that is out of
                                                                                              // range
          for (std::int64_t j = 0; j < 600; ++j) p.set(10, j, j % 5 == 0 ? -400.0f : -1.0f);  // p is below 2^-126
          for (std::int64_t j = 0; j < 600; ++j) p.set(11, j, -kInf);                         // an empty row
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
  run(forward);
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
    run_backward(b);
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
    run(forward);
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
    run_backward(b);
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
        // The relative error of p is the absolute error of log p.
        const double weight = (std::fabs(d1[i]) + std::fabs(d2[i]) + std::fabs(d3[i]) * (std::fabs(l) + entropy)) / T;
        // A p below 2^-126 is zero; at the target 1 - p is rounded, too.
        const double bound = weight * (q * (1e-5 + 4e-7 * magnitude) + 0x1p-126 + (j == p.target[i] ? 4e-7 : 0.0));
        ASSERT_NEAR(out.at(i, j), exact, bound) << i << ' ' << j;
      }
    }
  }
}

TEST_F(Logprob, GradientOfAConfidentTokenKeepsItsDigits) {
  // 1 - p of the target is 1e-5 and less. Computed from a p rounded to fp32 it would be wrong by 2^-25, whatever its
  // size.
  for (const Exp exp : kExps) {
    for (const float gap : {16.0f, 18.0f, 25.0f, 40.0f}) {
      Problem p(1, 100, DType::kFloat32, 23);
      p.exp = exp;
      p.temperature = {1.0f};
      p.target = {41};
      for (std::int64_t j = 0; j < 100; ++j) p.set(0, j, j == 41 ? 0.0f : -gap);
      const double others = 99 * std::exp(-static_cast<double>(gap));
      // The lse that a forward in double precision would save.
      const float lse = static_cast<float>(std::log1p(others)), d = 1.0f;
      Problem out = p;
      auto b = p.params<rlk::LogprobBackwardParams>();
      b.lse = &lse;
      b.dlogprob = &d;
      b.dlogits = out.address(0, 0);
      run_backward(b);
      const double exact = others / (1 + others);
      EXPECT_NEAR(out.at(0, 41), exact, 1e-6 * exact) << gap;

      // With the lse of our own forward, the error of S near 1 decides: two roundings, since exp2_stat(0) is exact.
      auto forward = p.params<rlk::LogprobParams>();
      Result saved(1);
      saved.point(&forward);
      run(forward);
      b.lse = saved.lse.data();
      run_backward(b);
      EXPECT_NEAR(out.at(0, 41), exact, 0x1p-22) << gap;
      for (std::int64_t j = 0; j < 100; ++j) ASSERT_TRUE(std::isfinite(out.at(0, j)));
    }
  }
}

}  // namespace
}  // namespace logprob_test
