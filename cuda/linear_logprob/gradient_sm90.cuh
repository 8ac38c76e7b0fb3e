// Gradients of the logits of some rows and columns on compute capability 9.0: hidden @ weight^T as linear computes it, and
// of each accumulator its gradient, rounded to the operands' type. The logits themselves never reach memory.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "../common/tensor_map.h"
#include "../linear/gemm_sm90.cuh"
#include "../logprob/probability.cuh"
#include "kernels.h"

namespace rlk::cuda {

using GradientTile = GemmTile<128, 256, false, false, Combine::kAdd>;
constexpr int kGradientGroup = 16;  // tiles along the rows that are neighbours in time

// What the two rows of a thread need of their gradients.
struct ThreadRows {
  BackwardRow row[2];
  int target[2];  // column of the product; -1 where it is not among them
  bool empty[2];
};

__device__ __forceinline__ void load_rows(const LogprobBackwardParams& p, int first, ThreadRows* rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t row = first + 8 * h;
    rows->empty[h] = true;
    rows->target[h] = -1;
    rows->row[h] = {};
    if (row >= p.num_rows) continue;
    const RowGradient gradient = row_gradient(p, row);
    if (gradient.empty(p.ignore_index)) continue;
    rows->empty[h] = false;
    rows->row[h] = backward_row(p, gradient, row);
    const std::int64_t target = gradient.target - p.vocab_start;
    if (target >= 0 && target < p.num_columns) rows->target[h] = static_cast<int>(target);
  }
}

// Accumulators of 256 columns from `column` on become the logits' gradients.
template <class T, Exp kExp, bool kRounded, int kFragment>
__device__ __forceinline__ void make_gradients(float (&d)[kFragment], const ThreadRows& rows, int column, int valid,
                                               int lane) {
  const int first = column + lane % 4 * 2;
  const auto logit = [](float x) { return kRounded ? T::load(T::store(x)) : x; };
  float at_target[2] = {0.0f, 0.0f};
  bool here[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) here[h] = rows.target[h] >= column && rows.target[h] < column + 2 * kFragment;
  const bool any_here = __any_sync(0xffffffff, here[0] || here[1]);
  if (any_here) {
#pragma unroll
    for (int k = 0; k < kFragment; ++k) {
      const int h = k / 2 % 2;
      if (rows.target[h] == first + k / 4 * 8 + k % 2) at_target[h] = logit(d[k]);
    }
  }
#pragma unroll
  for (int group = 0; group < kFragment; group += 16) {
    // A branch for every 32 columns: all at once their temporaries would not fit.
    if (column + 2 * group >= valid) continue;
#pragma unroll
    for (int k = group; k < group + 16; ++k)
      d[k] = column_gradient<Probability<kExp>>(logit(d[k]), rows.row[k / 2 % 2], false);
  }
  if (any_here) {
    float of_target[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) of_target[h] = column_gradient<Probability<kExp>>(at_target[h], rows.row[h], true);
#pragma unroll
    for (int k = 0; k < kFragment; ++k) {
      const int h = k / 2 % 2;
      if (rows.target[h] == first + k / 4 * 8 + k % 2) d[k] = of_target[h];
    }
  }
  if (__any_sync(0xffffffff, rows.empty[0] || rows.empty[1] || column + 2 * kFragment > valid)) {
#pragma unroll
    for (int k = 0; k < kFragment; ++k) {
      if (rows.empty[k / 2 % 2] || first + k / 4 * 8 + k % 2 >= valid) d[k] = 0.0f;
    }
  }
}

template <class T, Exp kExp, bool kRounded>
__global__ void __launch_bounds__(GradientTile::kThreads, 1)
    logit_gradients_sm90_kernel(const __grid_constant__ CUtensorMap map_x,
                                const __grid_constant__ CUtensorMap map_last_x,
                                const __grid_constant__ CUtensorMap map_w,
                                const __grid_constant__ CUtensorMap map_last_w,
                                const __grid_constant__ CUtensorMap map_d, const __grid_constant__ GemmLaunch g,
                                const __grid_constant__ LogprobBackwardParams p) {
  using Tile = GradientTile;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight][staging][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint32_t staging = base + g.stages * Tile::kStageBytes;
  const std::uint32_t full = staging + Tile::kWarpgroups * Tile::kStaging, empty = full + kMaxStages * 8;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4;
  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kWarpgroups * 4);
    mbarrier_init_fence();
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  const int tiles = g.tiles_a * g.tiles_b, step = static_cast<int>(gridDim.x);
  const auto tile_of = [&](int turn) {
    const TilePosition at = tile_position(g, turn);
    return TilePosition{at.a * Tile::kBM, at.b * Tile::kBN};
  };
  TileRing<Tile> ring{base, full, empty, g.stages, {}};
  if (warpgroup == Tile::kWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == Tile::kWarpgroups * 4 && elect_one()) {
      prefetch_tensor_map(&map_x);
      prefetch_tensor_map(&map_w);
      for (int turn = blockIdx.x; turn < tiles; turn += step) {
        const TilePosition at = tile_of(turn);
        const Portion<Tile::kBM, false> x(&map_x, &map_last_x, g.last_a, g.rows - at.a, 1, 0);
        const Portion<Tile::kBN, false> w(&map_w, &map_last_w, g.last_b, g.columns - at.b, 1, 0);
#pragma unroll 1
        for (int k = 0; k < g.k_steps; ++k) ring.load(x, w, at.a, at.b, k);
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
  };
  const std::int64_t left = p.valid_vocab - p.vocab_start;  // columns past valid_vocab have no gradient
  const int valid = static_cast<int>(left < p.num_columns ? left : p.num_columns);
  TilePosition next = tile_of(blockIdx.x);
  for (int turn = blockIdx.x; turn < tiles; turn += step) {
    const TilePosition at = next;
    ThreadRows rows;
    float d[Tile::kBN / 2];
    ring.template multiply<T>(d, g.k_steps, warpgroup, release, [&](int k) {  // beside products
      if (k > 0) return;
      load_rows(p, at.a + warp * 16 + lane / 4, &rows);
      if (turn + step < tiles) next = tile_of(turn + step);
    });
    make_gradients<T, kExp, kRounded>(d, rows, at.b, valid, lane);
    store_boxes<Tile::kBN, Tile::kStoreBuffers>(g, map_d, d, staging + warpgroup * Tile::kStaging, warpgroup,
                                                at.a + warpgroup * 64, at.b);
  }
  wait_for_stored_boxes<0>();  // no block leaves while its boxes are being read
}

template <class T, Exp kExp, bool kRounded>
void run_gradients(const LogprobBackwardParams& p, const Head& head, cudaStream_t stream) {
  using Tile = GradientTile;
  GemmLaunch g{};
  g.rows = static_cast<int>(p.num_rows);
  g.columns = static_cast<int>(p.num_columns);
  g.k_steps = static_cast<int>((head.in_features + kBoxK - 1) / kBoxK);
  g.last_a = (g.rows % Tile::kBM + 7) / 8 * 8;
  g.last_b = (g.columns % Tile::kBN + 7) / 8 * 8;
  g.tiles_a = (g.rows + Tile::kBM - 1) / Tile::kBM;
  g.tiles_b = (g.columns + Tile::kBN - 1) / Tile::kBN;
  g.group_a = kGradientGroup;
  g.d_dtype = head.dtype;
  const auto map = [&](const void* data, std::int64_t rows, std::int64_t columns, std::int64_t stride, int box_rows) {
    return tensor_map(data, head.dtype, rows, columns, stride, box_rows);
  };
  const std::int64_t padded = (head.in_features + 7) / 8 * 8;
  const std::int64_t stride_x = p.num_rows > 1 ? head.hidden_rows.inner_stride : padded;
  const std::int64_t stride_w = p.num_columns > 1 ? head.weight_stride : padded;
  const CUtensorMap x = map(head.hidden, p.num_rows, head.in_features, stride_x, Tile::kBM);
  const CUtensorMap last_x = g.last_a == 0 ? x : map(head.hidden, p.num_rows, head.in_features, stride_x, g.last_a);
  const CUtensorMap w = map(head.weight, p.num_columns, head.in_features, stride_w, Tile::kBN);
  const CUtensorMap last_w = g.last_b == 0 ? w : map(head.weight, p.num_columns, head.in_features, stride_w, g.last_b);
  const CUtensorMap d = map(p.dlogits, p.num_rows, p.num_columns, p.dlogits_rows.inner_stride, kStoreBoxRows);
  auto* kernel = logit_gradients_sm90_kernel<T, kExp, kRounded>;
  const int memory = allow_shared_memory<logit_gradients_sm90_kernel<T, kExp, kRounded>>();
  g.stages = std::min(kMaxStages, (memory - Tile::kFixedBytes) / Tile::kStageBytes);
  launch_dependent<true>(kernel, std::min(multiprocessors(current_device()), g.tiles_a * g.tiles_b), Tile::kThreads,
                         Tile::kFixedBytes + g.stages * Tile::kStageBytes, stream, x, last_x, w, last_w, d, g, p);
}

template <class T>
void run_gradients_for(const LogprobBackwardParams& p, const Head& head, cudaStream_t stream) {
  const bool rounded = p.dtype != DType::kFloat32;
  if (p.exp == Exp::kHardware) {
    return rounded ? run_gradients<T, Exp::kHardware, true>(p, head, stream)
                   : run_gradients<T, Exp::kHardware, false>(p, head, stream);
  }
  rounded ? run_gradients<T, Exp::kPortable, true>(p, head, stream)
          : run_gradients<T, Exp::kPortable, false>(p, head, stream);
}

}  // namespace rlk::cuda
