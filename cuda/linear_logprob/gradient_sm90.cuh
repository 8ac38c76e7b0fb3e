// Gradients of the logits of some rows and columns on compute capability 9.0: hidden @ weight^T as linear computes it, and
// of each accumulator its gradient, rounded to the operands' type. The logits themselves never reach memory.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "../common/tensor_map.h"
#include "../common/wave.h"
#include "../linear/gemm_sm90.cuh"
#include "../logprob/probability.cuh"
#include "head_operands_sm90.cuh"
#include "kernels.h"

namespace rlk::cuda {

using GradientTile = GemmTile<128, 256, false, false, Combine::kAdd>;

// What the two rows of a thread need of their gradients.
struct ThreadRows {
  BackwardRow row[2];
  int target[2];  // column of the product; -1 where it is not among them
  bool empty[2];
};

// Of rows `first` and 8 further of those in place of `groups`, both of one group.
__device__ __forceinline__ void load_rows(const LogprobBackwardParams& p, const ScoredGroups& groups, int first,
                                          ThreadRows* rows) {
  const int group = groups.group[first / kScoredGroupRows];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int64_t row = group * kScoredGroupRows + first % kScoredGroupRows + 8 * h;
    rows->empty[h] = true;
    rows->target[h] = -1;
    rows->row[h] = {};
    if (group < 0 || row >= p.num_rows) continue;
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
    logit_gradients_sm90_kernel(const __grid_constant__ HeadMaps head, const __grid_constant__ HeadMaps lora,
                                const __grid_constant__ CUtensorMap map_d, const __grid_constant__ GemmLaunch g,
                                int lora_steps, const ScoredGroups* groups,
                                const __grid_constant__ LogprobBackwardParams p) {
  using Tile = GradientTile;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight][staging][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint32_t staging = base + g.stages * Tile::kStageBytes;
  const std::uint32_t full = staging + Tile::kWarpgroups * Tile::kStaging, empty = full + kMaxStages * 8;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, warpgroup = warp / 4;
  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kWarpgroups * 4);
    mbarrier_init_fence();
  }
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  const int tiles_a = groups->limit / Tile::kBM, tiles = tiles_a * g.tiles_b, step = static_cast<int>(gridDim.x);
  const auto tile_of = [&](int turn) {
    const TilePosition at = tile_position(g, tiles_a, turn);
    return TilePosition{at.a * Tile::kBM, at.b * Tile::kBN};
  };
  TileRing<Tile> ring{base, full, empty, g.stages, {}};
  if (warpgroup == Tile::kWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == Tile::kWarpgroups * 4) {
      if (elect_one()) {
        prefetch_tensor_map(&head.x);
        prefetch_tensor_map(&head.w);
      }
      for (int turn = blockIdx.x; turn < tiles; turn += step) {
        const TilePosition at = tile_of(turn);
        const auto load = [&](const HeadMaps& maps, int steps) {
          load_stages<Tile::kBM, Tile::kBN>(&ring, maps, steps, {at.a, g.rows - at.a}, g.last_a, at.b, g.columns - at.b,
                                            g.last_b);
        };
        load(head, g.k_steps - lora_steps);
        load(lora, lora_steps);
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
      load_rows(p, *groups, at.a + warp * 16 + lane / 4, &rows);
      if (turn + step < tiles) next = tile_of(turn + step);
    });
    make_gradients<T, kExp, kRounded>(d, rows, at.b, valid, lane);
    store_boxes<Tile::kBN, Tile::kStoreBuffers>(g, map_d, d, staging + warpgroup * Tile::kStaging, warpgroup,
                                                at.a + warpgroup * 64, at.b);
  }
  wait_for_stored_boxes<0>();  // no block leaves while its boxes are being read
}

template <class T, Exp kExp, bool kRounded>
void run_gradients(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                   cudaStream_t stream) {
  using Tile = GradientTile;
  GemmLaunch g{};
  g.rows = static_cast<int>(p.num_rows);
  g.columns = static_cast<int>(p.num_columns);
  const int lora_steps = head_steps(head.lora_rank);
  g.k_steps = head_steps(head.in_features) + lora_steps;
  g.last_a = last_tile(g.rows, Tile::kBM);
  g.last_b = last_tile(g.columns, Tile::kBN);
  g.tiles_a = (g.rows + Tile::kBM - 1) / Tile::kBM;
  g.tiles_b = (g.columns + Tile::kBN - 1) / Tile::kBN;
  g.group_a = wave_height(multiprocessors(current_device()), g.tiles_a, Tile::kBM, Tile::kBN);
  g.d_dtype = head.dtype;
  const AllHeadMaps maps = all_head_maps(head, u, {nullptr, p.num_rows, 0, Tile::kBM, g.last_a},
                                         {nullptr, p.num_columns, 0, Tile::kBN, g.last_b});
  const CUtensorMap d =
      tensor_map(p.dlogits, head.dtype, p.num_rows, p.num_columns, p.dlogits_rows.inner_stride, kStoreBoxRows);
  auto* kernel = logit_gradients_sm90_kernel<T, kExp, kRounded>;
  const int memory = allow_shared_memory<logit_gradients_sm90_kernel<T, kExp, kRounded>>();
  g.stages = std::min(kMaxStages, (memory - Tile::kFixedBytes) / Tile::kStageBytes);
  launch_dependent<true>(kernel, std::min(multiprocessors(current_device()), g.tiles_a * g.tiles_b), Tile::kThreads,
                         Tile::kFixedBytes + g.stages * Tile::kStageBytes, stream, maps.head, maps.lora, d, g,
                         lora_steps, groups, p);
}

template <class T>
void run_gradients_for(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                       cudaStream_t stream) {
  const bool rounded = p.dtype != DType::kFloat32;
  if (p.exp == Exp::kHardware) {
    return rounded ? run_gradients<T, Exp::kHardware, true>(p, head, u, groups, stream)
                   : run_gradients<T, Exp::kHardware, false>(p, head, u, groups, stream);
  }
  rounded ? run_gradients<T, Exp::kPortable, true>(p, head, u, groups, stream)
          : run_gradients<T, Exp::kPortable, false>(p, head, u, groups, stream);
}

}  // namespace rlk::cuda
