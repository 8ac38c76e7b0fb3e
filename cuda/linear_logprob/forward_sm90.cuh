// Fused head on compute capability 9.0: hidden @ weight^T by TMA and wgmma, and of its accumulators the leaf statistics of
// logprob; no logits in memory. Two warpgroups of 64 rows share the weights' tile. Bound by the tensor cores, and by the
// power that they draw.
#pragma once

#include "../common/async_copy_sm80.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/element_dtype.cuh"
#include "../common/tile_ring_sm90.cuh"
#include "head_grid.h"
#include "head_operands_sm90.cuh"
#include "leaf_fragment_sm90.cuh"
#include "rlk/load_index.h"

namespace rlk::cuda {

template <int kM>
struct HeadTile {
  static constexpr int kBM = kM, kBN = kHeadTileColumns;
  static constexpr bool kAMnMajor = false, kBMnMajor = false;
  static constexpr int kBoxes = 1, kStageK = kBoxK;
  static constexpr int kWarpgroups = kBM / 64;
  static constexpr bool kTakesTurns = kWarpgroups == 2;
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
  HeadColumns columns;
  int row_blocks, blocks;      // blocks of all rows; those that run at once
  const ScoredGroups* groups;  // whose rows alone are multiplied, in place of all; null: all rows
  const void* bias;            // [columns], or null
  const void* target;
  const float* temperature;  // [rows], or null: temperature_value
  void* nodes;               // of runs of tiles, [node][padded rows]
  void* tile_nodes;          // of tiles or pairs that are work by themselves
  float* target_z;           // [rows]
  std::int64_t target_stride, vocab_start;
  float temperature_value, logit_scale, softcap, inverse_softcap;
  int rows, padded_rows, last_rows, last_columns, stages;
  int k_steps, lora_steps;  // stages of a tile, those of LoRA at its end among them
  DType bias_dtype, target_dtype, logits_dtype;
};

// What lies between the accumulators and z (rule 8): nothing, rounding to bf16, or whatever the launch says.
enum class HeadLogits : std::uint8_t { kPlain, kRounded, kGeneral };

// Two accumulators to bf16 and back, in their places: written as stores and loads, ptxas keeps both forms.
__device__ __forceinline__ void round_pair(float* low, float* high) {
  std::uint32_t a = __float_as_uint(*low), b = __float_as_uint(*high);
  asm("{\n.reg .b32 both;\ncvt.rn.bf16x2.f32 both, %3, %2;\nshl.b32 %0, both, 16;\nand.b32 %1, both, 0xffff0000;\n}\n"
      : "=r"(a), "=r"(b)
      : "f"(*low), "f"(*high));
  *low = __uint_as_float(a), *high = __uint_as_float(b);
}

// The first of a lane's two columns of eight. Read where it is asked for, for want of registers.
__device__ __forceinline__ int quad_column() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane % 4 * 2;
}

// Accumulators of columns from `column` on become z; -Inf from column `last` on.
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
        // A branch for each pair, all on conditions that differ for all the compiler knows: side by side the temporaries
        // would not fit.
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

// What a thread has of the eight columns j of its row h, of accumulators of columns from 8 kFirst on; j is the same in all
// lanes. By halves: accumulators have no addresses.
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

// Where the node of a row's tiles goes, and how far up: a tile's goes up while it is the second of a pair, or while there
// is no second.
struct NodeTarget {
  float4* to;  // of the first of a thread's rows, where `ends`; the second is 8 further
  int tile;    // of the strip
  bool ends;   // the strip, or all of it that the work has
};
constexpr int kNothingLeft = -2, kWholeTile = -1;  // instead of a level of pairs

// By a whole warp: rows of a tile, the first of which is `row` of those in place of groups; one box where they are
// neighbours and all there. The box of the call's last tile has too few rows for one that begins elsewhere.
template <int kM>
__device__ __forceinline__ TileRows<kM> tile_rows(const HeadLaunch& g, int row) {
  constexpr int kGroups = TileRows<kM>::kGroups;
  static_assert(kMostScoredGroups <= 1 << 16);
  row = same_in_warp(row);
  TileRows<kM> rows{row, g.rows - row};
  if (kM < kScoredTileRows || g.groups == nullptr) return rows;  // a block of 64 is the only one
  const int lane = static_cast<int>(threadIdx.x) % 32, left = g.groups->count - row / kScoredGroupRows;
  const int group = lane < min(kGroups, left) ? g.groups->group[row / kScoredGroupRows + lane] : 0;
  const auto of_lane = [&](int i) { return __shfl_sync(0xffffffff, group, i); };
  rows.first = of_lane(0) * kScoredGroupRows;
  rows.left = g.rows - rows.first;
  if (left >= kGroups && of_lane(kGroups - 1) == of_lane(0) + kGroups - 1 && rows.left >= kM) return rows;
  rows.count = same_in_warp(max(0, min(kGroups, left)));
#pragma unroll
  for (int i = 0; i < kGroups / 2; ++i) rows.pairs[i] = of_lane(2 * i) | of_lane(2 * i + 1) << 16;
  return rows;
}

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits, int kM>
__global__ void __launch_bounds__(HeadTile<kM>::kThreads, 1)
    linear_logprob_sm90_kernel(const __grid_constant__ HeadMaps head, const __grid_constant__ HeadMaps lora,
                               const __grid_constant__ HeadLaunch g) {
  using Tile = HeadTile<kM>;
  extern __shared__ __align__(1024) unsigned char shared[];  // [stages][x, weight][nodes][barriers]
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  auto* const kept = reinterpret_cast<float4*>(shared + (base - shared_address(shared)) + g.stages * Tile::kStageBytes);
  const std::uint32_t full = base + g.stages * Tile::kStageBytes + Tile::kNodeBytes, empty = full + kMaxStages * 8;
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32, warpgroup = warp / 4;

  if (threadIdx.x < g.stages) {
    mbarrier_init(full + threadIdx.x * 8, 1);
    mbarrier_init(empty + threadIdx.x * 8, Tile::kWarpgroups * 4);
  }
  if (threadIdx.x < 32) mbarrier_init_fence();
  allow_next_kernel();
  __syncthreads();
  wait_for_previous_kernel();
  __shared__ HeadItems items;
  if (threadIdx.x == 0) items = scored_items(g.columns, g.groups, g.row_blocks, kM, g.blocks);
  __syncthreads();

  TileRing<Tile> ring{base, full, empty, g.stages, {}};
  // Read where it is asked for: kept, it would be one register too many.
  const auto exists = [&](int index) { return index < head_work_items(items); };

  if (warpgroup == Tile::kWarpgroups) {
    if constexpr (Tile::kWarpgroups > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == Tile::kWarpgroups * 4) {
      if (elect_one()) {
        prefetch_tensor_map(&head.x);
        prefetch_tensor_map(&head.w);
      }
      for (int index = blockIdx.x; exists(index); index += gridDim.x) {
        const HeadWork work = head_work(g.columns, items, index);
        const TileRows<kM> rows = tile_rows<kM>(g, work.row_block * kM);
        const int last = same_in_warp(g.columns.part_last[work.part]), tiles = same_in_warp(work.tiles);
        const int strip = (work.strip * kStripTiles + work.first_tile) * kHeadTileColumns;
        int column = same_in_warp(g.columns.part_first[work.part] + strip);
        for (int tile = 0; tile < tiles; ++tile, column += kHeadTileColumns) {
          const auto load = [&](const HeadMaps& maps, int steps) {
            load_stages<kM, kHeadTileColumns>(&ring, maps, steps, rows, g.last_rows, column, last - column,
                                              g.last_columns);
          };
          load(head, g.k_steps - g.lora_steps);
          load(lora, g.lora_steps);
        }
      }
    }
    return;
  }
  if constexpr (Tile::kWarpgroups > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Tile::kRegisters));
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(empty + stage * 8);
  };
  const int in_block = warp * 16 + lane / 4;  // a thread's first row; the other is 8 further
  const auto pack = [](const SoftmaxStats& s) { return make_float4(s.m, s.S, s.E, s.Q); };
  // What the tile before left to do, a step beside each of this tile's first products: its node, then a level of pairs.
  TileShares shares;
  SoftmaxStats node[2];
  NodeTarget left{nullptr, 0, false};
  int level = kNothingLeft;
  const auto climb = [&] {
    if (level == kWholeTile) {
      tile_nodes<kMoments>(&shares, node);
      level = 0;
      return;
    }
    while (level < Tile::kNodeLevels && left.ends && !(left.tile >> level & 1)) ++level;
    if (level < Tile::kNodeLevels) {
      float4* const at = kept + level * kM + in_block;
      if (left.tile >> level & 1) {
        SoftmaxStats other[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float4 v = at[8 * h];
          other[h] = {v.x, v.y, v.z, v.w};
        }
        combine_rows<kMoments>(node, other);
        ++level;
        return;
      }
      if (lane % 4 == 0) at[0] = pack(node[0]), at[8] = pack(node[1]);
      __syncwarp();
    } else if (lane % 4 == 0) {
      left.to[0] = pack(node[0]), left.to[8] = pack(node[1]);
    }
    level = kNothingLeft;
  };

  HeadWork work = head_work(g.columns, items, blockIdx.x);
  for (int index = blockIdx.x; exists(index);) {
    const int row = work.row_block * kM + in_block;
    const int strip = (work.strip * kStripTiles + work.first_tile) * kHeadTileColumns;
    int column = g.columns.part_first[work.part] + strip;
    const int last = g.columns.part_last[work.part], tiles = work.tiles;
    float4* const to = work.whole
                           ? static_cast<float4*>(g.nodes) +
                                 std::int64_t{work.part * g.columns.strips_per_part + work.strip} * g.padded_rows + row
                           : static_cast<float4*>(g.tile_nodes) + std::int64_t{work.slot} * kM + in_block;
    if (tiles == 0 && lane % 4 == 0) to[0] = to[8] = pack(identity_stats());
    float c[2], temperature[2];
    std::int64_t target[2];
    index += gridDim.x;
    if (tiles == 0 && exists(index)) work = head_work(g.columns, items, index);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, column += kHeadTileColumns) {
      float d[Tile::kBN / 2];
      bool here = false;
      // Beside the products: what the tile before left, what this work's rows need, and which work comes next.
      const auto meanwhile = [&](int k) {
        const bool last_step = k == g.k_steps - 1;
        do {
          if (level != kNothingLeft) climb();
        } while (last_step && level != kNothingLeft);
        if (k == 0) {
          if (tile == 0) {
            int place = row;  // in the call
            if (g.groups != nullptr) {
              const int group = g.groups->group[row / kScoredGroupRows];
              place = group < 0 ? g.rows : group * kScoredGroupRows + row % kScoredGroupRows;
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int at = place + 8 * h;
              const bool is_row = at < g.rows;
              target[h] = is_row ? load_index(g.target, g.target_dtype, at * g.target_stride) - g.vocab_start : -1;
              temperature[h] = is_row && g.temperature != nullptr ? g.temperature[at] : g.temperature_value;
            }
          }
          if (tile == tiles - 1 && exists(index)) work = head_work(g.columns, items, index);
        }
        if (last_step) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (tile == 0) c[h] = log2_scale(temperature[h]);
            here = here || (target[h] >= column && target[h] < min(column + kHeadTileColumns, last));
          }
          here = __any_sync(kQuadLanes, here);
        }
      };
      ring.template multiply<T, false, kLogits == HeadLogits::kRounded>(d, g.k_steps, warpgroup, release, meanwhile);
      make_logits<kLogits>(g, d, column, last);
      if (here) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const std::int64_t at = target[h] - column - lane % 4 * 2;
          const bool is_mine = at >= 0 && at < Tile::kBN && at % 8 < 2 && target[h] < last;
          for (unsigned lanes = __ballot_sync(kQuadLanes, is_mine); lanes != 0; lanes &= lanes - 1) {
            const int holder = __ffs(lanes) - 1;
            const float2 z = pair_at<0, Tile::kBN / 8>(d, __shfl_sync(kQuadLanes, static_cast<int>(at) / 8, holder), h);
            if (lane == holder) g.target_z[row + 8 * h] = at % 2 == 0 ? z.x : z.y;
          }
        }
      }
      const auto z = [&](int leaf, int j, int h) { return columns_of(d, leaf * kLeafFragments, j, h); };
      leaf_shares<kExp, kMoments>(z, c, shares.of);
      left = {to, tile, tile == tiles - 1};
      level = kWholeTile;
    }
  }
  while (level != kNothingLeft) climb();
}

}  // namespace rlk::cuda
