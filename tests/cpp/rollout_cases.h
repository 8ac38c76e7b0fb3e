// Random batches of log-probabilities of a trainer and of an engine, and simple loops over their tokens. The tests of
// importance_weights and mismatch_metrics use them on every backend.
#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "policy_loss_cases.h"
#include "token_lanes.h"

namespace rollout_test {

using policy_test::kInf;
using policy_test::kShapes;
using rlk::Sequences;

// Arrays 0 and 4 are the trainer's and the engine's. A third of the tokens are equal in both; some of these tokens
// differ in the sign of a zero.
struct Batch : policy_test::Case {
  Sequences sequences;
  rlk::PolicyTokens train, rollout;
  rlk::TokenMask token_mask;

  Batch(unsigned seed, std::int64_t count, std::int64_t longest, bool packed) {
    policy_test::make_case(seed, count, longest, packed, this);
    std::mt19937 random(seed + 1);
    for (std::size_t i = 0; i < arrays[0].size(); ++i) {
      if (random() % 3 == 0) std::memcpy(&arrays[4][i], &arrays[0][i], 4);
      if (random() % 29 != 0) continue;
      arrays[0][i] = random() % 2 != 0 ? 0.0f : -0.0f;
      arrays[4][i] = random() % 2 != 0 ? 0.0f : -0.0f;
    }
    sequences = p.sequences;
    train = {arrays[0].data(), p.mask.row_stride, 1};
    rollout = {arrays[4].data(), p.mask.row_stride, 1};
    token_mask = p.mask;
    if (seed % 5 == 0 && seed % 4 != 0) token_mask = {};
    text = text.substr(0, text.find(" surrogate"));
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  std::int64_t begin(std::int64_t s) const {
    return sequences.packed() ? cuts64[static_cast<std::size_t>(s)] : s * p.mask.row_stride;
  }
  std::int64_t length(std::int64_t s) const {
    const auto i = static_cast<std::size_t>(s);
    return sequences.packed() ? cuts64[i + 1] - cuts64[i] : sequences.num_tokens;
  }
  // Slot in an output, whose rows are contiguous.
  std::size_t slot(std::int64_t s, std::int64_t t) const {
    return static_cast<std::size_t>((sequences.packed() ? begin(s) : s * sequences.num_tokens) + t);
  }
  bool counts(std::int64_t s, std::int64_t t) const { return policy_test::is_set(token_mask, begin(s) + t); }
  // Terms of the first four tokens of the trainer's and the engine's arrays.
  template <class Terms>
  void expect_four_alike(const typename Terms::Params& params, const typename Terms::Factors& factors) const {
    const bool of[4] = {counts(0, 0), counts(0, 1), counts(0, 2), counts(0, 3)};
    policy_test::expect_four_alike<Terms>(params, factors, {arrays[0].data(), arrays[4].data()}, of, text);
  }
  float train_of(std::int64_t s, std::int64_t t) const { return arrays[0][static_cast<std::size_t>(begin(s) + t)]; }
  float rollout_of(std::int64_t s, std::int64_t t) const { return arrays[4][static_cast<std::size_t>(begin(s) + t)]; }
};

// The batch's sequences, one row each, followed by masked slots that hold NaN.
struct Padded {
  std::vector<float> train, rollout;
  std::vector<unsigned char> mask;
  Sequences sequences;
  std::int64_t width;

  Padded(const Batch& b, std::int64_t columns) : width(columns) {
    const auto size = static_cast<std::size_t>(b.sequences.num_sequences * width);
    train.assign(size, NAN);
    rollout.assign(size, -NAN);
    mask.assign(size, 0);
    sequences = {nullptr, rlk::DType::kInt32, b.sequences.num_sequences, width};
    for (std::int64_t s = 0; s < sequences.num_sequences; ++s) {
      for (std::int64_t t = 0; t < b.length(s); ++t) {
        const auto to = static_cast<std::size_t>(s * width + t);
        mask[to] = b.counts(s, t);
        train[to] = b.train_of(s, t);
        rollout[to] = b.rollout_of(s, t);
      }
    }
  }
};

}  // namespace rollout_test
