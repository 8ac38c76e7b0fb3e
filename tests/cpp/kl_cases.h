// Random calls of kl, for the tests of every backend.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rlk/ops/kl.h"
#include "token_reference.h"

namespace kl_test {

constexpr int kArrays = 4;

// Arrays of a call in memory; masked elements are NaN, infinite or large.
struct Case {
  rlk::KlParams p;
  std::vector<float> arrays[kArrays];
  std::vector<unsigned char> mask;
  std::string text;
};

inline void make_case(unsigned seed, std::int64_t rows, std::int64_t tokens, Case* c) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::mt19937 random(seed);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  rlk::KlParams& p = c->p;
  p.spec.estimator = static_cast<rlk::KlEstimator>(1 + pick(4));
  p.spec.straight_through = pick(3) == 0;
  p.spec.weight = static_cast<rlk::KlWeight>(pick(3));
  p.spec.input_limit = pick(2) ? kInf : 0.25f;
  p.spec.limit = pick(2) ? kInf : 0.03f;
  p.sequences = {nullptr, rlk::DType::kInt32, rows, tokens};
  const std::int64_t row = tokens + pick(2) * pick(4), size = rows * row;
  const bool masked = pick(4) != 0, wild = pick(4) == 0;
  const float width = pick(3) == 0 ? 60.0f : 0.2f;  // wide: exponentials leave the range, while products may not
  p.mask = policy_test::random_mask(nullptr, row, pick(policy_test::kMaskKinds));
  const auto bytes = static_cast<std::size_t>(p.mask.bytes);
  c->mask.assign(static_cast<std::size_t>(size) * bytes + 8, 0);
  for (auto& array : c->arrays) array.resize(static_cast<std::size_t>(size) + 1);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < size; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const bool counts = !masked || pick(4) != 0;
    const float l = -std::fabs(normal(random)), f = pick(8) == 0 ? l : l + width * normal(random);
    const float o = l + width * normal(random);
    const float weight = p.spec.weight == rlk::KlWeight::kOldLogprob ? o : std::fabs(normal(random));
    const float values[kArrays] = {l, f, weight, normal(random)};
    for (int k = 0; k < kArrays; ++k) {
      constexpr float kWild[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f};
      c->arrays[k][at] = counts && !(wild && pick(16) == 0) ? values[k] : kWild[pick(5)];
    }
    unsigned char* const to = &c->mask[at * bytes];
    counts ? policy_test::set_flag(p.mask, pick(2), to) : policy_test::clear_flag(p.mask, pick(2), to);
  }
  p.mask = masked ? rlk::TokenMask{c->mask.data(), row, p.mask.bytes, p.mask.is_float} : rlk::TokenMask{nullptr, row};
  p.logprob = {c->arrays[0].data(), row, 1};
  p.ref_logprob = {c->arrays[1].data(), row, 1};
  if (p.spec.weight != rlk::KlWeight::kNone) p.weight = {c->arrays[2].data(), row, 1};
  p.d_kl = {c->arrays[3].data(), row, 1};
  c->text = "seed " + std::to_string(seed) + " [" + std::to_string(rows) + ", " + std::to_string(tokens) + " of " +
            std::to_string(row) + "] estimator " + std::to_string(static_cast<int>(p.spec.estimator)) + " weight " +
            std::to_string(static_cast<int>(p.spec.weight));
}

}  // namespace kl_test
