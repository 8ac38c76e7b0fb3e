// Products of attention as the matrix unit of sm_90 computes them: linear's lanes on attention's tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_lanes.h"
#include "linear_lanes.h"

namespace rlk::cpu {

// The unit of a call's products: kIeee, plain chains of fma, unless it has bf16 or fp16 operands on sm_90.
Arithmetic attention_products(const AttentionInput& p);

// multiply and accumulate as in AttentionLanes, with the same tiles, in rule 1's steps of 16.
class AttentionMma {
 public:
  // `columns` of a row of floats, at most `rows` rows.
  AttentionMma(LinearUnit unit, std::int64_t rows, std::int64_t columns);

  // scores[i][j] = q[i] . k[j] from +0, for j below `keys`; they lie transposed: [head_dim, kTileKeys].
  void multiply(const float* q, int rows, const float* transposed, std::int64_t head_dim, int keys, float* scores);
  // sums[i] goes on over the block's keys with weights[i] and v: [keys, columns]. The weight of what a row does not see,
  // and kNothing, is +0. A row that sees nothing keeps its sums.
  void accumulate(const float* weights, const AttentionColumns* sees, int rows, int keys, const float* v, float* sums);
  // The same with the fewest links that a GPU can have: where v holds Inf or NaN, a row has the steps of 16 that it sees
  // something of. Tiles of a GPU's backward differ in what else they multiply by +0.
  void accumulate_seen(const float* weights, const AttentionColumns* sees, int rows, int keys, const float* v,
                       float* sums);

 private:
  // accumulate over the keys [begin, end) of the block, which are whole steps of 16.
  void accumulate_keys(const float* weights, const AttentionColumns* sees, int rows, int begin, int end, const float* v,
                       float* sums);
  // sums += a . b over k, for one B panel's columns.
  void product(int rows, int k, float* sums, std::int64_t stride);

  const LinearLanes& lanes_;
  const LinearUnit unit_;
  const std::int64_t columns_;
  std::vector<float> a_, b_, sums_;
  std::vector<std::int32_t> a_exponents_, b_exponents_;
};

}  // namespace rlk::cpu
