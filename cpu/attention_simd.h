// The inner loops of the operator `attention`. CMake compiles attention_simd.cpp once per instruction set. Tiles are
// fp32 in the caller's memory. A row has kTileKeys floats, one per key, or `columns` floats, one per column of a head.
// Heads are padded with +0 to a multiple of kColumns.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "rlk/ops/attention.h"

namespace rlk::cpu {

constexpr int kColumns = 16;
constexpr int kTileKeys = 128;  // keys per tile: the largest block
static_assert(attention_block(1) == kTileKeys && attention_block(kMaxHeadDim) == kTileKeys / 2);
constexpr std::int64_t kMaxColumns = kMaxHeadDim;

// Columns [first, last) of a row of scores or weights: the keys of a block that the row sees.
struct AttentionColumns {
  int first, last;
};

// Parameters that turn products of q and k into exponents: c, the softcap (0: none), and fl(softmax_scale / softcap).
struct AttentionScores {
  float c, cap, inner;
};

struct AttentionLanes {
  // Loads a head of a token, at any alignment, as `columns` floats.
  void (*load)(const unsigned char* from, DType dtype, std::int64_t head_dim, std::int64_t columns, float* to);
  // to[d][r] = rows[r][d]; rows from `count` to kTileKeys are +0.
  void (*transpose)(const float* rows, int count, std::int64_t head_dim, std::int64_t columns, float* to);
  // products[i][j] = a chain over d ascending of a[i][d] * b[d][j], for j below `keys`, which is kTileKeys or
  //     kTileKeys / 2.
  void (*multiply)(const float* a, int rows, std::int64_t columns, const float* b, std::int64_t head_dim, int keys,
                   float* products);
  // Applies the softcap to a row's products with the keys that it sees; the results are scores.
  void (*cap)(float* products, AttentionColumns sees, AttentionScores how);
  // The largest score of a row among the keys that it sees; NaN if any is NaN.
  float (*largest)(const float* scores, AttentionColumns sees);
  // Turns scores into probabilities rounded to dtype, and adds the unrounded probabilities to the chains. A score that
  // contributes nothing becomes kNothing. Returns whether the row sees a score that became kNothing.
  bool (*probabilities)(float* scores, AttentionColumns sees, float c, float m, float q, Exp exp, DType dtype,
                        float* chains);
  // Backward: replaces products of q and k by p, and dp by ds, both rounded to dtype. A score that contributes nothing
  // becomes kNothing, and the function returns what probabilities() returns. Column j uses u[j * step] and delta[j *
  // step].
  bool (*gradients)(float* products, float* dp, AttentionColumns sees, AttentionScores how, const float* u,
                    const float* delta, int step, Exp exp, DType dtype);
  // sums[i] = a chain over j ascending of weights[i][j] * x[j], continued from sums[i]. `holes` says that some
  //   weight may be kNothing (see below).
  void (*accumulate)(const float* weights, const AttentionColumns* sees, int rows, bool holes, const float* x,
                     std::int64_t columns, float* sums);
  void (*scale)(float* x, std::int64_t count, float factor);  // x *= factor
  // total = fma(total, factor, x * factor_of_x). Counts are multiples of kColumns.
  void (*merge)(float* total, const float* x, std::int64_t count, float factor, float factor_of_x);
  void (*add)(float* total, const float* x, std::int64_t count);  // total += x
  // Dot product in eight chains over d. The sums of the chains are added in the order of the chains of l
  // (rlk/ops/attention.h).
  float (*dot)(const float* a, const float* b, std::int64_t head_dim);
  void (*store)(const float* row, std::int64_t head_dim, DType dtype, unsigned char* to);
};

// Marks an addend that a chain leaves out: the bits of -0, which no probability has. If a chain added the -0, it would
// change at most the sign of a zero sum.
constexpr std::int32_t kNothing = static_cast<std::int32_t>(0x80000000u);

RLK_CPU_LANES(AttentionLanes, attention_simd)

}  // namespace rlk::cpu
