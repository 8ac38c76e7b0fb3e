// A CUDA thread computes four tokens at once. Each token must get the bits that it gets alone.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/tokens/terms.h"
#include "kernels/tokens/vec4.h"
#include "token_reference.h"

namespace policy_test {

// Runs the terms on four tokens, the columns of `arrays`. Tokens with `counts` set are scored.
template <class Terms>
void expect_four_alike(const typename Terms::Params& p, const typename Terms::Factors& factors,
                       const std::vector<const float*>& arrays, const bool (&counts)[4], const std::string& text) {
  rlk::Vec4 in[Terms::kInputs], out[Terms::kOutputs];
  rlk::Vec4Mask mask;
  for (int j = 0; j < 4; ++j) {
    mask.v[j] = counts[j] ? -1 : 0;
    for (int k = 0; k < Terms::kInputs; ++k) in[k].v[j] = counts[j] ? arrays[static_cast<std::size_t>(k)][j] : 0.0f;
  }
  rlk::TokenSums<rlk::Vec4, Terms::kSums> four;
  rlk::token_at<Terms>(p, factors, in, mask, out, &four, 0);
  for (int j = 0; j < 4; ++j) {
    float one[Terms::kInputs], of_one[Terms::kOutputs];
    for (int k = 0; k < Terms::kInputs; ++k) one[k] = in[k].v[j];
    rlk::TokenSums<float, Terms::kSums> alone;
    rlk::token_at<Terms>(p, factors, one, counts[j], of_one, &alone, j);
    std::vector<float> got, want;
    for (int i = 0; i < Terms::kOutputs; ++i) {
      got.push_back(out[i].v[j]);
      want.push_back(of_one[i]);
    }
    if constexpr (Terms::kSums > 0) {
      for (int i = 0; i < Terms::kSums; ++i) {
        got.push_back(rlk::canonical(four.sum[i].v[j]));
        want.push_back(rlk::canonical(alone.sum[i]));
      }
      for (int i = 0; i < Terms::kMaxima; ++i) {
        got.push_back(rlk::canonical(four.maximum[i].v[j]));
        want.push_back(rlk::canonical(alone.maximum[i]));
      }
      for (int i = 0; i < rlk::kTokenCounts; ++i) EXPECT_EQ(four.count[i].v[j] != 0, alone.count[i]) << text;
    }
    EXPECT_TRUE(same_bytes(got, want)) << text << ", token " << j;
  }
}

}  // namespace policy_test
