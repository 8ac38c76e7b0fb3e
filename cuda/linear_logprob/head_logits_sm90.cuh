// Arguments of the fused head's kernels, and their steps before the statistics: z (the logits after bias, rounding,
// scale and softcap: rule 8 of docs/numerics.md), z of the target, and the rows of a tile.
#pragma once

#include "../common/element_dtype.cuh"
#include "head_grid.h"
#include "head_operands_sm90.cuh"
#include "leaf_fragment_sm90.cuh"

namespace rlk::cuda {

struct HeadLaunch {
  HeadColumns columns;
  int row_blocks, blocks;      // number of row blocks; number of thread blocks that run at once
  const ScoredGroups* groups;  // the groups whose rows are multiplied; null: all rows
  const void* bias;            // [columns], or null
  const void* target;
  const float* temperature;  // [rows], or null: temperature_value
  void* nodes;               // nodes of runs of tiles, [node][padded rows]
  void* tile_nodes;          // nodes of tiles or pairs that are separate work items
  float* target_z;           // [rows]
  std::int64_t target_stride, vocab_start;
  float temperature_value, logit_scale, softcap, inverse_softcap;
  int rows, padded_rows, last_rows, last_columns, stages;
  int k_steps, lora_steps;  // stages of a tile, including LoRA's stages at the end; stages of LoRA
  DType bias_dtype, target_dtype, logits_dtype;
};

// The steps from accumulators to z: no step, rounding to bf16, or the steps that the launch's arguments request.
enum class HeadLogits : std::uint8_t { kPlain, kRounded, kGeneral };

// Rounds two accumulators to bf16 in place. With separate conversions ptxas would keep rounded and unrounded values in
// registers.
__device__ __forceinline__ void round_pair(float* low, float* high) {
  std::uint32_t a = __float_as_uint(*low), b = __float_as_uint(*high);
  asm("{\n.reg .b32 both;\ncvt.rn.bf16x2.f32 both, %3, %2;\nshl.b32 %0, both, 16;\nand.b32 %1, both, 0xffff0000;\n}\n"
      : "=r"(a), "=r"(b)
      : "f"(*low), "f"(*high));
  *low = __uint_as_float(a), *high = __uint_as_float(b);
}

// The first of a lane's two columns among eight columns. Each call reads the lane index again, which saves registers.
__device__ __forceinline__ int quad_column() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane % 4 * 2;
}

// Converts the accumulators to z. The first belongs to `column`; those from column `last` on become -Inf.
template <HeadLogits kLogits, int kFragment>
__device__ __forceinline__ void make_logits(const HeadLaunch& g, float (&d)[kFragment], int column, int last) {
#pragma unroll
  for (int j = 0; j < kFragment / 4; ++j) {
    if constexpr (kLogits == HeadLogits::kRounded) {
      round_pair(&d[4 * j], &d[4 * j + 1]);
      round_pair(&d[4 * j + 2], &d[4 * j + 3]);
    }
    if constexpr (kLogits == HeadLogits::kGeneral) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Each pair has a branch whose condition the compiler cannot merge with other conditions. Without these
        // branches, the temporaries of all pairs would be live at once, and registers have no room for them.
        int end = last;
        asm volatile("" : "+r"(end));
        if (column + 8 * j >= end) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& z = d[4 * j + 2 * h + i];
          if (g.bias != nullptr) {
            const int at = column + 8 * j + quad_column() + i;
            if (at < last) z = add_rn(z, load_element(g.bias, g.bias_dtype, at));
          }
          if (g.logits_dtype == DType::kBFloat16) z = Bf16::load(Bf16::store(z));
          if (g.logits_dtype == DType::kFloat16) z = Fp16::load(Fp16::store(z));
          z = scaled_logit(z, g.logit_scale, g.softcap, g.inverse_softcap);
        }
      }
    }
  }
  if (last - column >= 2 * kFragment) return;
  const int first = column + quad_column();
#pragma unroll
  for (int k = 0; k < kFragment; ++k) {
    if (first + k / 4 * 8 + k % 2 >= last) d[k] = -infinity();
  }
}

// A thread's two values of its row h in the j-th eight columns, counted from column 8 kFirst. j is the same in all
// lanes. Registers cannot be indexed, so a bisection selects the values.
template <int kFirst, int kCount, int kFragment>
__device__ __forceinline__ float2 pair_at(const float (&d)[kFragment], int j, int h) {
  if constexpr (kCount == 1) {
    return make_float2(d[4 * kFirst + 2 * h], d[4 * kFirst + 2 * h + 1]);
  } else {
    constexpr int kHalf = kCount / 2;
    if (j < kFirst + kHalf) return pair_at<kFirst, kHalf>(d, j, h);
    return pair_at<kFirst + kHalf, kCount - kHalf>(d, j, h);
  }
}

// The rows of a tile that begins at `row`, an index that counts only rows of scored groups. All lanes of a warp call
// this function. Neighbouring rows of a full tile are loaded as one box. The call's last tile has a shorter box, which
// fits no other tile.
template <int kRows>
__device__ __forceinline__ TileRows<kRows> tile_rows(const HeadLaunch& g, int row) {
  constexpr int kGroups = TileRows<kRows>::kGroups;
  static_assert(kMostScoredGroups <= 1 << 16);
  row = same_in_warp(row);
  TileRows<kRows> rows{row, g.rows - row};
  if (g.groups == nullptr) return rows;
  const int lane = static_cast<int>(threadIdx.x) % 32, left = g.groups->count - row / kScoredGroupRows;
  const int group = lane < min(kGroups, left) ? g.groups->group[row / kScoredGroupRows + lane] : 0;
  const auto of_lane = [&](int i) { return __shfl_sync(0xffffffff, group, i); };
  rows.first = of_lane(0) * kScoredGroupRows;
  rows.left = g.rows - rows.first;
  if (left >= kGroups && of_lane(kGroups - 1) == of_lane(0) + kGroups - 1 && rows.left >= kRows) return rows;
  rows.count = same_in_warp(max(0, min(kGroups, left)));
#pragma unroll
  for (int i = 0; i < kGroups / 2; ++i) rows.pairs[i] = of_lane(2 * i) | of_lane(2 * i + 1) << 16;
  return rows;
}

}  // namespace rlk::cuda
