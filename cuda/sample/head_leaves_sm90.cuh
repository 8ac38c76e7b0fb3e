// The first launch of linear_sample for at most 64 rows on compute capability 9.0: hidden @ weight^T by TMA and wgmma.
// A tile is one leaf of all rows. One warpgroup computes the leaf's node in each row's tree. The warpgroup also draws a
// column of the leaf for each row. A column can be drawn before the leaf is drawn, because a row's random words below a
// leaf are the same for all leaves. No logits are written to memory. Bound by HBM.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/element_dtype.cuh"
#include "../common/tile_ring_sm90.cuh"
#include "../linear_logprob/head_grid.h"
#include "../linear_logprob/head_operands_sm90.cuh"
#include "../linear_logprob/leaf_fragment_sm90.cuh"
#include "head_kernels.h"
#include "kernels/sample/check.h"
#include "kernels/sample/tree.h"

namespace rlk::cuda {

struct LeafTile : OneWarpgroupTile<kMostFusedRows, kLeafColumns> {
  // Eight stages leave shared memory for blocks of the next launch, which begin while this kernel runs.
  static constexpr int kStages = 8;
};

struct LeafLaunch {
  HeadColumns columns;
  int leaves_per_part, leaves;  // leaves of the longest part; number of tiles in all parts
  int height;                   // levels of a part's tree
  float* nodes;                 // for each row: nodes of its leaves, then drawn columns; rows are row_floats apart
  std::int64_t row_floats;
  const void* bias;  // [vocab_size], or null
  DType bias_dtype, logits_dtype;
  int rows, last_rows, last_columns, k_steps, prefetched_steps;
};

// Converts the accumulators of columns from `column` on to logits. Columns from `last` on do not exist.
template <int kFragment>
__device__ __forceinline__ void round_logits(const LeafLaunch& g, float (&d)[kFragment], int column, int last) {
  const int first = column + static_cast<int>(threadIdx.x) % 4 * 2;
  if (g.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < kFragment / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = first + 8 * j + i;
        const float b = at < last ? load_element(g.bias, g.bias_dtype, at) : 0.0f;
        d[4 * j + i] = add_rn(d[4 * j + i], b);
        d[4 * j + 2 + i] = add_rn(d[4 * j + 2 + i], b);
      }
    }
  }
  const DType dtype = g.logits_dtype;
  if (dtype == DType::kFloat32) return;
#pragma unroll
  for (int i = 0; i < kFragment; ++i) {
    d[i] = dtype == DType::kBFloat16 ? Bf16::load(Bf16::store(d[i])) : Fp16::load(Fp16::store(d[i]));
  }
}

// The column of a leaf that one row draws, and its z.
struct LeafDraw {
  float z;
  int column;
  bool mine;  // whether this lane has the column and its z
};

// Draws a column of the leaf for row h of the lane. Each of the four lanes that share a row holds two chains. `m`: the
// leaf's terms are relative to 2^m. `words`: the random words for the chains, then the word for the prefix.
template <Exp kExp, int kFragment>
__device__ __forceinline__ LeafDraw draw_leaf(const float (&d)[kFragment], int h, float c, float m,
                                              const std::uint32_t (&words)[4]) {
  const float clamp = leaf_clamp(c, m), addend = leaf_addend<kExp>(m);
  float terms[2][kLeafFragments], one[2] = {};
#pragma unroll
  for (int j = 0; j < kLeafFragments; ++j) {
    const float2 x = columns_of(d, 0, j, h);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float z = i == 0 ? x.x : x.y, e = leaf_exponential<kExp>(z > clamp ? z : clamp, c, addend);
      terms[i][j] = z == -infinity() ? 0.0f : e;
      one[i] = add_rn(one[i], terms[i][j]);
    }
  }
  const int quad = static_cast<int>(threadIdx.x) % 4;
  const bool upper_four = (quad & 2) != 0, upper_two = (quad & 1) != 0;
  const float two = add_rn(one[0], one[1]), next_two = quad_xor(two, 1), four = add_rn(two, next_two);
  const float next_four = quad_xor(four, 2), all = add_rn(four, next_four);
  const bool left_four = draws_left(words[0], upper_four ? next_four : four, all);
  const bool left_two = draws_left(words[1], upper_two ? next_two : two, four);
  const bool left_one = draws_left(words[2], one[0], two);
  const float sum = left_one ? one[0] : one[1];
  float prefix = 0.0f;
  LeafDraw drawn{0.0f, 0, (left_four != upper_four) && (left_two != upper_two)};
  bool found = false;
#pragma unroll
  for (int j = 0; j < kLeafFragments; ++j) {
    const float2 x = columns_of(d, 0, j, h);
    prefix = add_rn(prefix, left_one ? terms[0][j] : terms[1][j]);
    const bool reached = draws_left(words[3], prefix, sum);
    if (reached && !found) {
      drawn.z = left_one ? x.x : x.y;
      drawn.column = j * kNumChains + 2 * quad + (left_one ? 0 : 1);
    }
    found = found || reached;
  }
  return drawn;
}

template <class T, Exp kExp>
__global__ void __launch_bounds__(LeafTile::kThreads, 1)
    linear_sample_leaves_sm90_kernel(const __grid_constant__ HeadMaps maps, const __grid_constant__ SampleParams draw,
                                     const __grid_constant__ LeafLaunch g) {
  using Tile = LeafTile;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint32_t full = base + Tile::kStages * Tile::kStageBytes, empty = full + kMaxStages * 8;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, warpgroup = warp / 4;

  // Calls fn(slot, first column, number of columns left in the part) for the block's leaves.
  const auto each_leaf = [&](const auto& fn) {
    for (int index = static_cast<int>(blockIdx.x); index < g.leaves; index += static_cast<int>(gridDim.x)) {
      const int part = index / g.leaves_per_part, leaf = index - part * g.leaves_per_part;
      const int column = g.columns.part_first[part] + leaf * kLeafColumns, left = g.columns.part_last[part] - column;
      if (left > 0) fn((part << g.height) + leaf, same_in_warp(column), same_in_warp(left));
    }
  };
  const bool loads = warp == Tile::kWarpgroups * 4;
  if (loads) {
    if (elect_one()) {
      prefetch_tensor_map(&maps.x);
      prefetch_tensor_map(&maps.w);
    }
    // Prefetches the first weights while the previous kernel still runs. The prefetch fills only L2, because the
    // previous kernel may still write the weights.
    const int part = static_cast<int>(blockIdx.x) / g.leaves_per_part;
    const int column = g.columns.part_first[part] + (static_cast<int>(blockIdx.x) % g.leaves_per_part) * kLeafColumns;
    const int left = g.columns.part_last[part] - column;
    const Portion<kLeafColumns, false> w(&maps.w, &maps.last_w, g.last_columns, left, 1, 0);
    if (elect_one()) {
#pragma unroll 1
      for (int k = 0; k < g.prefetched_steps; ++k) w.prefetch(column, k * kBoxK);
    }
    __syncwarp();
  }
  if (threadIdx.x < Tile::kStages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kWarpgroups * 4);
  }
  if (threadIdx.x < 32) mbarrier_init_fence();
  __syncthreads();
  // The next kernel reads the call's arguments before it waits for this kernel. The kernel that ran before this kernel
  // may write the arguments. So the next kernel may begin only after that earlier kernel has ended.
  wait_for_previous_kernel();
  allow_next_kernel();

  TileRing<Tile> ring{base, full, empty, Tile::kStages, {}};
  if (warpgroup == Tile::kWarpgroups) {
    if (!loads) return;
    each_leaf([&](int, int column, int left) {
      const TileRows<Tile::kBM> rows{0, g.rows};
      load_stages<Tile::kBM, kLeafColumns>(&ring, maps, g.k_steps, rows, g.last_rows, column, left, g.last_columns);
    });
    return;
  }
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
  };
  const int row = warp * 16 + lane / 4;  // a thread's first row; its second row is 8 rows further
  float c[kTileRows];
  std::uint32_t words[kTileRows][4];
#pragma unroll
  for (int h = 0; h < kTileRows; ++h) {
    const int at = row + 8 * h;
    c[h] = log2_scale(at < g.rows ? sample_row_of<PlainMemory>(draw, at).temperature : 1.0f);
    const DrawWords<PlainMemory> word(draw, at < g.rows ? at : 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) words[h][k] = word(kChainWord + k);
  }
  each_leaf([&](int slot, int column, int left) {
    float d[Tile::kBN / 2];
    ring.template multiply<T>(d, g.k_steps, warpgroup, release, [](int) {});
    const int last = column + left;
    round_logits(g, d, column, last);
    if (left < kLeafColumns) {
      const int first = lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < Tile::kBN / 2; ++k) {
        if (first + k / 4 * 8 + k % 2 >= left) d[k] = -infinity();
      }
    }
    SoftmaxStats shares[1][kTileRows];
    leaf_shares<kExp, false>([&](int, int j, int h) { return columns_of(d, 0, j, h); }, c, shares);
    add_shares<false>(shares);
#pragma unroll
    for (int h = 0; h < kTileRows; ++h) {
      const LeafDraw drawn = draw_leaf<kExp>(d, h, c[h], shares[0][h].m, words[h]);
      if (row + 8 * h >= g.rows) continue;
      float* const nodes = g.nodes + (row + 8 * h) * g.row_floats;
      if (lane % 4 == 0) *reinterpret_cast<float2*>(nodes + 2 * slot) = make_float2(shares[0][h].m, shares[0][h].S);
      if (drawn.mine) {
        float* const to = nodes + 2 * (std::int64_t{kNumParts} << g.height) + 2 * slot;
        *reinterpret_cast<float2*>(to) = make_float2(drawn.z, __int_as_float(column + drawn.column));
      }
    }
    __syncwarp();
  });
}

}  // namespace rlk::cuda
