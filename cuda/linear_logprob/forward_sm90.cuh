// Fused head on compute capability 9.0: hidden @ weight^T by TMA and wgmma, and of its accumulators the leaf statistics of
// logprob; no logits in memory. Two warpgroups of 64 rows share the weights' tile. Bound by the tensor cores, and by the
// power that they draw.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/element_dtype.cuh"
#include "../common/tile_ring_sm90.cuh"
#include "head_grid.h"
#include "leaf_fragment_sm90.cuh"
#include "rlk/load_index.h"

namespace rlk::cuda {

template <int kM>
struct HeadTile {
  static constexpr int kBM = kM, kBN = kHeadTileColumns;
  static constexpr bool kAMnMajor = false, kBMnMajor = false;
  static constexpr int kBoxes = 1, kStageK = kBoxK;
  static constexpr int kWarpgroups = kBM / 64;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kRegisters =
      (504 - 40) / kWarpgroups / 8 * 8;  // of a thread that multiplies; 40 of one that loads
  static constexpr int kBytesA = kBM * kBoxK * 2, kBytesB = kBN * kBoxK * 2, kBoxBytes = kBytesA + kBytesB;
  static constexpr int kStageBytes = kBoxBytes;
  static constexpr int kNodeLevels = 3;  // of pairs of tiles in a strip
  static constexpr int kNodeBytes = kNodeLevels * kBM * 16;
  static constexpr int kFixedBytes = 1024 + kNodeBytes + 2 * kMaxStages * 8;
};

struct HeadLaunch {
  HeadGrid grid;
  const void* bias;  // [columns], or null
  const void* target;
  const float* temperature;  // [rows], or null: temperature_value
  float4* nodes;             // [strips][padded rows]
  float4* tile_nodes;        // [items from whole_items on][kStripTiles][rows of a block]
  float* target_z;           // [rows]
  std::int64_t target_stride, vocab_start, ignore_index;
  float temperature_value, logit_scale, softcap, inverse_softcap;
  int rows, padded_rows, k_steps, last_rows, last_columns, stages;
  DType bias_dtype, target_dtype, logits_dtype;
};

// What lies between the accumulators and z (rule 8): nothing, rounding to bf16, or whatever the launch says.
enum class HeadLogits : std::uint8_t { kPlain, kRounded, kGeneral };

// z of an accumulator of a column of the shard; -Inf from column `last` on, where drop_columns has been.
template <HeadLogits kLogits>
__device__ __forceinline__ float head_logit(const HeadLaunch& g, float d, int column, int last) {
  if constexpr (kLogits == HeadLogits::kRounded) return Bf16::load(Bf16::store(d));
  if constexpr (kLogits == HeadLogits::kGeneral) {
    if (column >= last) return -infinity();
    if (g.bias != nullptr) d = add_rn(d, load_element(g.bias, g.bias_dtype, column));
    if (g.logits_dtype == DType::kBFloat16) d = Bf16::load(Bf16::store(d));
    if (g.logits_dtype == DType::kFloat16) d = Fp16::load(Fp16::store(d));
    return scaled_logit(d, g.logit_scale, g.softcap, g.inverse_softcap);
  }
  return d;
}

// Accumulators of columns past the last become -Inf.
template <int kFragment>
__device__ __forceinline__ void drop_columns(float (&d)[kFragment], int columns, int lane) {
  if (columns >= 2 * kFragment) return;
#pragma unroll
  for (int j = 0; j < kFragment / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * j + lane % 4 * 2 + i >= columns) d[4 * j + i] = d[4 * j + 2 + i] = -infinity();
    }
  }
}

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits, int kM>
__global__ void __launch_bounds__(HeadTile<kM>::kThreads, 1)
    linear_logprob_sm90_kernel(const __grid_constant__ CUtensorMap map_x,
                               const __grid_constant__ CUtensorMap map_last_x,
                               const __grid_constant__ CUtensorMap map_w,
                               const __grid_constant__ CUtensorMap map_last_w, const __grid_constant__ HeadLaunch g) {
  using Tile = HeadTile<kM>;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight][nodes][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  auto* const kept = reinterpret_cast<float4*>(shared + (base - shared_address(shared)) + g.stages * Tile::kStageBytes);
  const std::uint32_t full = base + g.stages * Tile::kStageBytes + Tile::kNodeBytes, empty = full + kMaxStages * 8;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4;

  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kWarpgroups * 4);
  }
  if (threadIdx.x < 32) mbarrier_init_fence();
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();

  TileRing<Tile> ring{base, full, empty, g.stages, {}};
  const int work_items = head_work_items(g.grid);

  if (warpgroup == Tile::kWarpgroups) {
    if constexpr (Tile::kWarpgroups > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == Tile::kWarpgroups * 4 && elect_one()) {
      prefetch_tensor_map(&map_x);
      prefetch_tensor_map(&map_w);
      for (int index = blockIdx.x; index < work_items; index += gridDim.x) {
        const HeadWork work = head_work(g.grid, index);
        const int row = work.row_block * kM, last = g.grid.part_last[work.part];
        const Portion<kM, false> x(&map_x, &map_last_x, g.last_rows, g.rows - row, 1, 0);
        int column = g.grid.part_first[work.part] + (work.strip * kStripTiles + work.first_tile) * kHeadTileColumns;
        for (int tile = 0; tile < work.tiles; ++tile, column += kHeadTileColumns) {
          const Portion<kHeadTileColumns, false> w(&map_w, &map_last_w, g.last_columns, last - column, 1, 0);
#pragma unroll 1
          for (int k = 0; k < g.k_steps; ++k) ring.load(x, w, row, column, k);
        }
      }
    }
    return;
  }
  if constexpr (Tile::kWarpgroups > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
  };
  for (int index = blockIdx.x; index < work_items; index += gridDim.x) {
    const HeadWork work = head_work(g.grid, index);
    const int in_block = warp * 16 + lane / 4, row = work.row_block * kM + in_block;  // and row + 8
    float c[2];
    std::int64_t target[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool exists = row + 8 * h < g.rows;
      target[h] = exists ? load_index(g.target, g.target_dtype, (row + 8 * h) * g.target_stride) - g.vocab_start : -1;
      const float temperature = exists && g.temperature != nullptr ? g.temperature[row + 8 * h] : g.temperature_value;
      c[h] = log2_scale(temperature);
    }
    SoftmaxStats node[2] = {identity_stats(), identity_stats()};
    int column = g.grid.part_first[work.part] + (work.strip * kStripTiles + work.first_tile) * kHeadTileColumns;
    const int last = g.grid.part_last[work.part];
#pragma unroll 1
    for (int tile = 0; tile < work.tiles; ++tile, column += kHeadTileColumns) {
      float d[Tile::kBN / 2];
      ring.template multiply<T>(d, g.k_steps, warpgroup, release, [](int) {});
      drop_columns(d, last - column, lane);
      const auto logit = [&](float x, int j) { return head_logit<kLogits>(g, x, column + j + lane % 4 * 2, last); };
      bool here = false;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        here = here || (target[h] >= column && target[h] < min(column + kHeadTileColumns, last));
      if (__any_sync(kQuadLanes, here)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::int64_t at = target[h] - column - lane % 4 * 2;
          if (target[h] >= last) continue;
#pragma unroll
          for (int j = 0; j < Tile::kBN / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (at == 8 * j + i) g.target_z[row + 8 * h] = logit(d[4 * j + 2 * h + i], 8 * j + i);
            }
          }
        }
      }
      // A tile's node goes up while it is the second of a pair, or while there is no second.
      const bool ends = tile == work.tiles - 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        node[h] = leaf_statistics<kExp, kMoments>(d, 0, h, c[h], logit);
        node[h] = combine(node[h], leaf_statistics<kExp, kMoments>(d, 1, h, c[h], logit));
      }
#pragma unroll 1
      for (int level = 0; level < Tile::kNodeLevels; ++level) {
        float4* const at = kept + level * kM + in_block;
        if (tile >> level & 1) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float4 other = at[8 * h];
            node[h] = combine({other.x, other.y, other.z, other.w}, node[h]);
          }
        } else if (!ends) {
          if (lane % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) at[8 * h] = make_float4(node[h].m, node[h].S, node[h].E, node[h].Q);
          }
          break;
        }
      }
      __syncwarp();
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 value = make_float4(node[h].m, node[h].S, node[h].E, node[h].Q);
        if (work.whole) {
          g.nodes[std::int64_t{work.part * g.grid.strips_per_part + work.strip} * g.padded_rows + row + 8 * h] = value;
        } else {
          g.tile_nodes[std::int64_t{work.slot} * kM + in_block + 8 * h] = value;
        }
      }
    }
  }
}

}  // namespace rlk::cuda
