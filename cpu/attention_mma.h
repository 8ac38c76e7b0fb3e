// Products of attention in the arithmetic of sm_90's matrix unit. The inner loops of the operator `linear` compute them
// on attention's tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_simd.h"
#include "linear_simd.h"

namespace rlk::cpu {

// Unit of a call's products: kSm90 if the operands are bf16 or fp16 and the call asks for sm_90, else kIeee, which is
// plain chains of fma.
Arithmetic attention_products(const AttentionInput& p);

// Has the functions multiply() and accumulate() of AttentionLanes. They take the same tiles, but compute in steps of 16
// (docs/numerics.md, rule 1).
class AttentionMma {
 public:
  // The tiles have at most `rows` rows.
  AttentionMma(LinearUnit unit, std::int64_t rows);

  // scores[i][j] = q[i] . k[j] from +0, for j below `keys`. `q` is [rows, columns]. The keys lie transposed: [head_dim,
  // kTileKeys].
  void multiply(const float* q, int rows, std::int64_t columns, const float* transposed, std::int64_t head_dim,
                int keys, float* scores);
  // Adds weights[i] . v to sums[i] over the block's keys; `v` is [keys, columns], and `sums` is [rows, columns]. A key
  // that a row does not see, or whose weight is kNothing, has the weight +0. A row that sees no key keeps its sums.
  void accumulate(const float* weights, const AttentionColumns* sees, int rows, int keys, const float* v,
                  std::int64_t columns, float* sums);
  // accumulate() with the fewest steps that a GPU's backward may take. If v holds Inf or NaN, a row takes only the
  // steps of 16 in which it sees a key. A GPU may also take other steps, with the weight +0, depending on its tiles.
  void accumulate_seen(const float* weights, const AttentionColumns* sees, int rows, int keys, const float* v,
                       std::int64_t columns, float* sums);

 private:
  // Accumulates over the keys [begin, end) of the block, a range of whole steps of 16.
  void accumulate_keys(const float* weights, const AttentionColumns* sees, int rows, int begin, int end, const float* v,
                       std::int64_t columns, float* sums);
  // sums += a . b over k, for the columns of one B panel.
  void product(int rows, int k, float* sums, std::int64_t stride);

  const LinearLanes& lanes_;
  const LinearUnit unit_;
  std::vector<float> a_, b_, sums_;
  std::vector<std::int32_t> a_exponents_, b_exponents_;
};

}  // namespace rlk::cpu
