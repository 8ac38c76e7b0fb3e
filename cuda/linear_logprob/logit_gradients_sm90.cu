// Gradients of the logits of some rows and columns on compute capability 9.0: hidden @ weight^T as linear computes it,
// then the gradient for each accumulator, rounded to the operands' type. The logits themselves are never written to
// memory. CMake compiles this file once per operand type.

#include "../common/async_copy_sm80.cuh"
#include "../common/concurrent_tiles.h"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "../common/ping_pong_sm90.cuh"
#include "../common/tensor_map.h"
#include "../linear/gemm_sm90.cuh"
#include "../logprob/probability.cuh"
#include "head_operands_sm90.cuh"
#include "kernels.h"

namespace rlk::cuda {

using GradientTile = PingPongTile<192>;
constexpr int kGradientStaging = kStoreBoxBytes;  // bytes per warpgroup; the rest of shared memory holds stages

// Values that the gradients of a row's logits need. The type Row is `BackwardRow`, or `SmoothedRow` with label
// smoothing.
template <class Row>
struct alignas(16) GradientRow {
  Row row;
  int target;  // the target's column in the product; -1 if the product does not contain the target's column
  bool empty;
};

// The constants for the gradients of row `at` of `groups`.
template <class Row>
__device__ __forceinline__ GradientRow<Row> gradient_row(const LogprobBackwardParams& p, const ScoredGroups& groups,
                                                         int at) {
  GradientRow<Row> out{{}, -1, true};
  const int group = groups.group[at / kScoredGroupRows];
  const std::int64_t row = group * kScoredGroupRows + at % kScoredGroupRows;
  if (group < 0 || row >= p.num_rows) return out;
  const RowGradient gradient = row_gradient(p, row);
  if (gradient.empty(p.ignore_index)) return out;
  out.empty = false;
  set_row(p, gradient, row, &out.row);
  const std::int64_t target = gradient.target - p.vocab_start;
  if (target >= 0 && target < p.num_columns) out.target = static_cast<int>(target);
  return out;
}
template <class Row>
constexpr int kGradientRowBytes = GradientTile::kBM* static_cast<int>(sizeof(GradientRow<Row>));  // bytes per warpgroup
template <class Row>
constexpr int kGradientFixedBytes = 1024 + GradientTile::kWarpgroups*(kGradientStaging + kGradientRowBytes<Row>)+(
                                               2 * kMaxStages + GradientTile::kWarpgroups) *
                                               8;
static_assert(kGradientRowBytes<BackwardRow> == GradientTile::kBM * 32);

// Converts the accumulators of columns from `column` on to gradients of the logits.
template <class T, Exp kExp, bool kRounded, class Row, int kFragment>
__device__ __forceinline__ void make_gradients(float (&d)[kFragment], const GradientRow<Row> (&rows)[2], int column,
                                               int valid, int lane) {
  const int first = column + lane % 4 * 2;
  const auto logit = [](float x) { return kRounded ? T::load(T::store(x)) : x; };
  float at_target[2] = {0.0f, 0.0f};
  bool here[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) here[h] = rows[h].target >= column && rows[h].target < column + 2 * kFragment;
  const bool any_here = __any_sync(0xffffffff, here[0] || here[1]);
  if (any_here) {
#pragma unroll
    for (int k = 0; k < kFragment; ++k) {
      const int h = k / 2 % 2;
      if (rows[h].target == first + k / 4 * 8 + k % 2) at_target[h] = logit(d[k]);
    }
  }
#pragma unroll
  for (int group = 0; group < kFragment; group += 16) {
    // Every 32 columns begin with a branch. Without branches the temporaries of all columns would not fit in registers.
    if (column + 2 * group >= valid) continue;
#pragma unroll
    for (int k = group; k < group + 16; ++k)
      d[k] = column_gradient<Probability<kExp>>(logit(d[k]), rows[k / 2 % 2].row, false);
  }
  if (any_here) {
    float of_target[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) of_target[h] = column_gradient<Probability<kExp>>(at_target[h], rows[h].row, true);
#pragma unroll
    for (int k = 0; k < kFragment; ++k) {
      const int h = k / 2 % 2;
      if (rows[h].target == first + k / 4 * 8 + k % 2) d[k] = of_target[h];
    }
  }
  if (__any_sync(0xffffffff, rows[0].empty || rows[1].empty || column + 2 * kFragment > valid)) {
#pragma unroll
    for (int k = 0; k < kFragment; ++k) {
      if (rows[k / 2 % 2].empty || first + k / 4 * 8 + k % 2 >= valid) d[k] = 0.0f;
    }
  }
}

template <class T, Exp kExp, bool kRounded, class Row>
__global__ void __launch_bounds__(GradientTile::kThreads, 1)
    logit_gradients_sm90_kernel(const __grid_constant__ HeadMaps head, const __grid_constant__ HeadMaps lora,
                                const __grid_constant__ CUtensorMap map_d, const __grid_constant__ GemmLaunch g,
                                int lora_steps, const ScoredGroups* groups,
                                const __grid_constant__ LogprobBackwardParams p) {
  using Tile = GradientTile;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight][staging][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint32_t staging = base + g.stages * Tile::kStageBytes;
  const std::uint32_t all_rows = staging + Tile::kWarpgroups * kGradientStaging;
  const std::uint32_t full = all_rows + Tile::kWarpgroups * kGradientRowBytes<Row>, empty = full + kMaxStages * 8;
  const std::uint32_t turn_barriers = empty + kMaxStages * 8;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, warpgroup = warp / 4;
  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kArrivals);
  }
  if (threadIdx.x < Tile::kWarpgroups) mbarrier_init(turn_barriers + threadIdx.x * 8, 4);
  if (threadIdx.x < 32) mbarrier_init_fence();
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Tile::kLoaderRegisters));
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
  const auto arrive = [&](std::uint32_t barrier) {
    if (elect_one()) mbarrier_arrive(barrier);
  };
  const std::int64_t left = p.valid_vocab - p.vocab_start;  // columns from valid_vocab on have no gradient
  const int valid = static_cast<int>(left < p.num_columns ? left : p.num_columns);
  auto* const tile_rows =
      reinterpret_cast<GradientRow<Row>*>(shared + (all_rows - shared_address(shared))) + warpgroup * Tile::kBM;
  const auto all_warps = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); };
  if (warpgroup == 1) skip_stages(&ring, g.k_steps);
  int parity = warpgroup == 0;  // order of turns: first warpgroup, second warpgroup, then the next tile
  for (int turn = blockIdx.x + warpgroup * step; turn < tiles; turn += 2 * step, parity ^= 1) {
    all_warps();  // all threads have read the rows of the previous tile
    const int mine = static_cast<int>(threadIdx.x) % kWarpgroup;
    tile_rows[mine] = gradient_row<Row>(p, *groups, tile_of(turn).a + mine);
    all_warps();
    float d[Tile::kHalves][Tile::kFragment];
    mbarrier_wait_block(turn_barriers + warpgroup * 8, parity);
    multiply_in_turn<T>(
        &ring, d, g.k_steps, [&](int stage) { arrive(empty + stage * 8); },
        [&] { arrive(turn_barriers + (warpgroup ^ 1) * 8); });
    skip_stages(&ring, g.k_steps);
    const TilePosition at = tile_of(turn);
#pragma unroll 1  // one copy of the instructions stays in the instruction cache, which the other warpgroup's products need, too
    for (int half = 0; half < Tile::kHalves; ++half) {
      const GradientRow<Row>* const first = tile_rows + half * 64 + warp % 4 * 16 + lane / 4;
      make_gradients<T, kExp, kRounded, Row>(d[0], {first[0], first[8]}, at.b, valid, lane);
      store_boxes<Tile::kBN, 1, T>(g, map_d, d[0], staging + warpgroup * kGradientStaging, warpgroup, at.a + half * 64,
                                   at.b);
#pragma unroll
      for (int i = 0; i < Tile::kFragment; ++i) d[0][i] = d[1][i];
    }
  }
  wait_for_stored_boxes<0>();  // no block exits while TMA still reads the block's boxes
}

template <class T, Exp kExp, bool kRounded, class Row>
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
  auto* kernel = logit_gradients_sm90_kernel<T, kExp, kRounded, Row>;
  const int memory = allow_shared_memory<logit_gradients_sm90_kernel<T, kExp, kRounded, Row>>();
  g.stages = std::min(kMaxStages, (memory - kGradientFixedBytes<Row>) / Tile::kStageBytes);
  launch_dependent<true>(kernel, std::min(multiprocessors(current_device()), g.tiles_a * g.tiles_b), Tile::kThreads,
                         kGradientFixedBytes<Row> + g.stages * Tile::kStageBytes, stream, maps.head, maps.lora, d, g,
                         lora_steps, groups, p);
}

template <class T, class Row>
void run_gradients_of(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                      cudaStream_t stream) {
  const bool rounded = p.dtype != DType::kFloat32;
  if (p.exp == Exp::kHardware) {
    return rounded ? run_gradients<T, Exp::kHardware, true, Row>(p, head, u, groups, stream)
                   : run_gradients<T, Exp::kHardware, false, Row>(p, head, u, groups, stream);
  }
  rounded ? run_gradients<T, Exp::kPortable, true, Row>(p, head, u, groups, stream)
          : run_gradients<T, Exp::kPortable, false, Row>(p, head, u, groups, stream);
}

template <class T>
void run_logit_gradients(const LogprobBackwardParams& p, const Head& head, const void* u, const ScoredGroups* groups,
                         cudaStream_t stream) {
  p.label_smoothing != 0.0f ? run_gradients_of<T, SmoothedRow>(p, head, u, groups, stream)
                            : run_gradients_of<T, BackwardRow>(p, head, u, groups, stream);
}

template void run_logit_gradients<RLK_PART>(const LogprobBackwardParams&, const Head&, const void*, const ScoredGroups*,
                                            cudaStream_t);

}  // namespace rlk::cuda
