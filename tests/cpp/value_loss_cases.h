// Random calls of value_loss, for the tests of every backend.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rlk/ops/value_loss.h"
#include "token_reference.h"

namespace value_test {

constexpr int kArrays = 4;

// Arrays of a call in memory; masked elements are NaN, infinite or large.
struct Case {
  rlk::ValueLossParams p;
  std::vector<float> arrays[kArrays];
  std::vector<unsigned char> mask;
  std::vector<std::int32_t> cuts32;
  std::vector<std::int64_t> cuts64;
  std::string text;
};

// `sequences` of up to `longest` tokens. Some values are multiples of 1/8, so that bounds and ties occur.
inline void make_case(unsigned seed, std::int64_t sequences, std::int64_t longest, bool packed, Case* c) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::mt19937 random(seed);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  rlk::ValueLossParams& p = c->p;
  p.spec.clip = pick(3) == 0 ? kInf : 0.25f;
  p.spec.huber = pick(2) ? kInf : 0.5f;
  p.spec.denominator = static_cast<rlk::DenominatorKind>(pick(4));
  p.spec.sequence_mean = pick(2);
  p.spec.horizon = pick(3) == 0 ? 37.0f : 0.0f;
  p.spec.scale = pick(2) ? 1.0f : 3.0f;
  rlk::Sequences& q = p.sequences;
  q.num_sequences = sequences;
  q.num_tokens = longest;
  if (packed) {
    std::int64_t at = 0;
    c->cuts64.push_back(0);
    for (std::int64_t s = 0; s < sequences; ++s) {
      at += pick(5) == 0 ? 0 : static_cast<std::int64_t>(random() % static_cast<unsigned long>(longest + 1));
      c->cuts64.push_back(at);
    }
    c->cuts32.assign(c->cuts64.begin(), c->cuts64.end());
    q.num_tokens = at;
    q.cu_dtype = pick(2) ? rlk::DType::kInt64 : rlk::DType::kInt32;
    q.cu_seqlens = q.cu_dtype == rlk::DType::kInt64 ? static_cast<const void*>(c->cuts64.data()) : c->cuts32.data();
  }
  const std::int64_t row = q.num_tokens + (packed ? 0 : pick(3) * pick(4));
  const std::int64_t size = packed ? q.num_tokens : sequences * row;
  const bool masked = pick(4) != 0, wild = pick(4) == 0, coarse = pick(2) == 0;
  p.mask = policy_test::random_mask(nullptr, row, pick(policy_test::kMaskKinds));
  const auto bytes = static_cast<std::size_t>(p.mask.bytes);
  c->mask.assign(static_cast<std::size_t>(size) * bytes + 8, 0);
  for (auto& array : c->arrays) array.resize(static_cast<std::size_t>(size) + 1);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < size; ++i) {
    const auto at = static_cast<std::size_t>(i);
    // One sequence has no token that counts.
    const bool counts = !masked || (pick(4) != 0 && !(sequences > 2 && !packed && i / (row ? row : 1) == 1));
    const float v = normal(random);
    float values[kArrays] = {v, v + 0.3f * normal(random), v + normal(random), std::fabs(normal(random))};
    for (int k = 0; k < kArrays; ++k) {
      constexpr float kWild[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f};
      if (coarse) values[k] = std::round(8.0f * values[k]) / 8.0f;
      c->arrays[k][at] = counts && !(wild && pick(16) == 0) ? values[k] : kWild[pick(5)];
    }
    unsigned char* const to = &c->mask[at * bytes];
    counts ? policy_test::set_flag(p.mask, pick(2), to) : policy_test::clear_flag(p.mask, pick(2), to);
  }
  p.mask = masked ? rlk::TokenMask{c->mask.data(), row, p.mask.bytes, p.mask.is_float} : rlk::TokenMask{nullptr, row};
  p.value = {c->arrays[0].data(), row, 1};
  if (p.spec.clip < kInf) p.old_value = {c->arrays[1].data(), row, 1};
  p.returns = {c->arrays[2].data(), row, 1};
  if (pick(3) == 0) p.token_weight = {c->arrays[3].data(), row, 1};
  p.denominator_value = pick(2) ? 0.0f : 123.5f;
  c->text = "seed " + std::to_string(seed) + " [" + std::to_string(sequences) + ", " + std::to_string(q.num_tokens) +
            "]" + (packed ? " packed" : "") + (masked ? " masked" : "") + (wild ? " wild" : "");
}

}  // namespace value_test
