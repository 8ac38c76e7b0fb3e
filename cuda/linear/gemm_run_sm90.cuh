// The tiles for which kernels of gemm_sm90.cuh are built, and the launch of a plan. Each translation unit has one
// element type.
#pragma once

#include <algorithm>

#include "../common/alignment.h"
#include "../common/concurrent_tiles.h"
#include "../common/kernel_memory.h"
#include "../common/tensor_map.h"
#include "gemm_sm90.cuh"
#include "gemm_sm90.h"
#include "gemm_small_m_sm90.cuh"
#include "kernels/rows/row_pitch.h"

namespace rlk::cuda {

template <class... Tiles>
struct TileList {};

template <int kM, int kN>
using ForwardTile = GemmTile<kM, kN, false, false, Combine::kAdd>;
template <int kM, int kN>
using TransposedTile = GemmTile<kM, kN, false, false, Combine::kAdd, true>;
template <int kM, int kN>
using SegmentTile = GemmTile<kM, kN, false, false, Combine::kTree>;
template <int kM, int kN>
using InputGradTile = GemmTile<kM, kN, false, true, Combine::kAdd>;
template <int kM, int kN>
using WeightGradTile = GemmTile<kM, kN, true, true, Combine::kAdd>;
template <int kM, int kN>
using WeightFoldTile = GemmTile<kM, kN, true, true, Combine::kFold>;

template <int kM, int kN>
using ContinuedForwardTile = GemmTile<kM, kN, false, false, Combine::kContinue>;
template <int kM, int kN>
using ContinuedInputGradTile = GemmTile<kM, kN, false, true, Combine::kContinue>;
// `kUnit`: the weights' rows begin at multiples of kUnit bytes, 2 or 4.
template <int kM, int kN, int kUnit>
using RowTile = GemmTile<kM, kN, false, false, Combine::kAdd, true, kUnit>;

// Tiles whose kernels also copy operands that TMA cannot read.
template <bool kAExtentContiguous, bool kBExtentContiguous>
using CopyingTile = GemmTile<128, 256, kAExtentContiguous, kBExtentContiguous, Combine::kAdd, false, 0, true>;

using BuiltTiles =
    TileList<ForwardTile<64, 32>, ForwardTile<64, 48>, ForwardTile<64, 64>, ForwardTile<64, 96>, ForwardTile<64, 112>,
             ForwardTile<64, 128>, ForwardTile<128, 96>, ForwardTile<128, 192>, ForwardTile<128, 224>,
             ForwardTile<128, 256>, TransposedTile<64, 80>, TransposedTile<64, 96>, TransposedTile<64, 160>,
             TransposedTile<128, 112>, TransposedTile<128, 128>, TransposedTile<128, 160>, TransposedTile<128, 192>,
             TransposedTile<128, 224>, TransposedTile<192, 96>, TransposedTile<192, 160>, SegmentTile<64, 64>,
             SegmentTile<128, 128>, ContinuedForwardTile<64, 64>, ContinuedForwardTile<128, 256>, InputGradTile<64, 64>,
             InputGradTile<128, 128>, InputGradTile<128, 192>, InputGradTile<128, 256>, ContinuedInputGradTile<64, 64>,
             ContinuedInputGradTile<128, 256>, WeightGradTile<64, 64>, WeightGradTile<128, 128>,
             WeightGradTile<128, 192>, WeightGradTile<128, 256>, WeightFoldTile<128, 128>>;

inline Combine combination_of(const GemmParams& p) {
  if (p.segments > 1) return Combine::kTree;
  if (p.continues) return Combine::kContinue;
  const bool in_memory = p.block == 0 || p.contraction <= p.block || p.d_dtype == DType::kFloat32;
  return in_memory ? Combine::kAdd : Combine::kFold;
}

template <class Tile>
bool fits(const GemmParams& p, const GemmPlan& plan) {
  constexpr int kRows = Tile::kTransposed ? Tile::kBN : Tile::kBM, kColumns = Tile::kTransposed ? Tile::kBM : Tile::kBN;
  return !plan.small_m && plan.transposed == Tile::kTransposed && plan.row_unit == Tile::kUnit &&
         plan.copies == Tile::kCopies && plan.tile_m == kRows && plan.tile_n == kColumns &&
         p.a.contraction_contiguous == !Tile::kAMnMajor && p.b.contraction_contiguous == !Tile::kBMnMajor &&
         combination_of(p) == Tile::kCombine;
}

inline CUtensorMap map_of(const GemmOperand& operand, DType dtype, std::int64_t extent, std::int64_t contraction,
                          int box_rows, L2Reads reads = L2Reads::k256Bytes) {
  const std::int64_t rows = operand.contraction_contiguous ? extent : contraction;
  const std::int64_t columns = operand.contraction_contiguous ? contraction : extent;
  // The stride of a single row has no meaning, and TMA may refuse it.
  const std::int64_t stride = rows > 1 ? operand.rows.inner_stride : round_up_8(columns);
  return tensor_map(operand.data, dtype, rows, columns, stride, box_rows, reads);
}

inline RowStreams row_streams(const GemmOperand& x, std::int64_t extent, std::int64_t contraction) {
  // The stride of a single row has no meaning, and need not be a multiple of the unit.
  return {reinterpret_cast<std::uint64_t>(x.data), extent > 1 ? x.rows.inner_stride * 2 : 0,
          static_cast<int>(contraction * 2), static_cast<int>(extent)};
}

// A small prefetch hides the latency of the first access to HBM. A larger prefetch would delay loads for which the
// kernel waits (README.md).
constexpr int kPrefetchedBytes = 32 << 10;

// `weight_rows`: weight rows per block.
inline GemmLaunch launch_of(const GemmParams& p, int stage_k, int weight_rows) {
  GemmLaunch g{};
  g.d = p.d;
  g.bias = p.bias;
  g.addend = p.addend;
  g.row_limit = p.row_limit;
  g.d_stride = p.d_rows.inner_stride;
  g.addend_stride = p.addend_rows.inner_stride;
  g.rows = static_cast<int>(p.m);
  g.columns = static_cast<int>(p.n);
  g.k_steps = static_cast<int>((p.contraction + stage_k - 1) / stage_k);
  g.chunk_steps = g.k_steps;
  if (p.segments > 1) g.chunk_steps = g.k_steps / p.segments;
  if (p.block > 0) g.chunk_steps = std::min<int>(g.k_steps, static_cast<int>(p.block / stage_k));
  g.chunks = (g.k_steps + g.chunk_steps - 1) / g.chunk_steps;
  g.prefetched_steps = std::min(g.k_steps, std::max(1, kPrefetchedBytes / (weight_rows * stage_k * 2)));
  g.d_dtype = p.d_dtype;
  g.bias_dtype = p.bias_dtype;
  g.vector_stores = rows_begin_at_16_bytes(p.d, p.d_rows, p.m, size_of(p.d_dtype));
  g.vector_addend = rows_begin_at_16_bytes(p.addend, p.addend_rows, p.m, sizeof(float));
  return g;
}

// `x`: the operand that TMA cannot read, or null. `to`: the copy of x.
inline CopiedOperand copied_operand(const GemmOperand* x, const GemmOperand& to, std::int64_t extent,
                                    std::int64_t contraction) {
  if (x == nullptr) return {};
  const std::int64_t columns = to.contraction_contiguous ? contraction : extent;
  const std::int64_t rows = to.contraction_contiguous ? extent : contraction;
  CopiedOperand c{};
  c.from = reinterpret_cast<std::uint64_t>(x->data);
  c.to = static_cast<uint4*>(const_cast<void*>(to.data));
  c.stride = rows > 1 ? x->rows.inner_stride * 2 : 0;
  c.pitch = to.rows.inner_stride / 8;
  c.rows = static_cast<int>(rows);
  c.columns = static_cast<int>(columns);
  c.vectors = static_cast<int>((columns + 7) / 8);
  const std::uint64_t last_row = c.from + (rows - 1) * c.stride;
  c.first_vector = (std::min(c.from, last_row) + 15) / 16 * 16;
  c.last_vector = (std::max(c.from, last_row) + columns * 2) / 16 * 16;
  return c;
}
// Pieces are copied in the order in which tiles run: columns of `g.group_a` tiles, `blocks` tiles at a time.
inline CopiedOperands copied_operands(const GemmParams& p, const GemmLaunch& g, int blocks) {
  CopiedOperands c{};
  c.ranges = static_cast<int>((p.contraction + kCopyRange - 1) / kCopyRange);
  c.claimed = p.copy_counters;
  c.done = c.claimed + 1;
  c.panels_a = g.tiles_a;
  c.panels_b = g.tiles_b;
  c.a = copied_operand(p.copied_a, p.a, p.m, p.contraction);
  c.b = copied_operand(p.copied_b, p.b, p.n, p.contraction);
  c.wave_a = std::min(g.group_a, c.panels_a);
  c.wave_b = (blocks + c.wave_a - 1) / c.wave_a;
  c.waves_b = (c.panels_b + c.wave_b - 1) / c.wave_b;
  c.waves = c.waves_b + (c.panels_a + c.wave_a - 1) / c.wave_a - 1;
  return c;
}

template <class T, class Tile>
void run_tiles(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  const GemmOperand &a = Tile::kTransposed ? p.b : p.a, &b = Tile::kTransposed ? p.a : p.b;
  const std::int64_t extent_a = Tile::kTransposed ? p.n : p.m, extent_b = Tile::kTransposed ? p.m : p.n;
  GemmLaunch g = launch_of(p, Tile::kStageK, Tile::kTransposed ? Tile::kBM : Tile::kBN);
  g.cluster = plan.cluster;
  if (plan.cluster > 1) g.prefetched_steps = 0;  // clusters lose 1 to 2 % by prefetches
  g.last_a = static_cast<int>(round_up_8(extent_a % Tile::kBM));
  g.last_b = static_cast<int>(round_up_8(extent_b % Tile::kBN));
  const auto tiles = [](std::int64_t extent, int tile) { return static_cast<int>((extent + tile - 1) / tile); };
  g.tiles_a = tiles(extent_a, Tile::kBM * plan.cluster);
  g.tiles_b = tiles(extent_b, Tile::kBN);
  const int clusters_at_once = multiprocessors(current_device()) / plan.cluster;
  // True if each weight is read once and not all tiles run at the same time.
  const bool streams = (Tile::kTransposed ? g.tiles_b : g.tiles_a) == 1 && g.tiles_a * g.tiles_b > clusters_at_once;
  const auto map = [&](const GemmOperand& operand, std::int64_t extent, int box_rows) {
    return map_of(operand, p.dtype, extent, p.contraction, box_rows, streams ? L2Reads::k128Bytes : L2Reads::k256Bytes);
  };
  const CUtensorMap map_b = map(b, extent_b, (Tile::kBMnMajor ? kBoxK : Tile::kBN) / plan.cluster);
  const CUtensorMap map_a = Tile::kLoadsRows ? map_b : map(a, extent_a, Tile::kAMnMajor ? kBoxK : Tile::kBM);
  const CUtensorMap map_last_a =
      Tile::kLoadsRows || Tile::kAMnMajor || g.last_a == 0 ? map_a : map(a, extent_a, g.last_a);
  const CUtensorMap map_last_b = Tile::kBMnMajor || g.last_b == 0 ? map_b : map(b, extent_b, g.last_b);
  if constexpr (Tile::kLoadsRows) {
    g.k_steps = g.chunk_steps = (g.k_steps + 1) / 2 * 2;
    g.rows_of_a = row_streams(a, extent_a, p.contraction);
    g.follows_copy = p.a_is_copy;
  }
  CUtensorMap map_d{};
  if constexpr (Tile::kBoxStores) {
    constexpr bool kInRegisters = Tile::kCombine == Combine::kTree || Tile::kCombine == Combine::kFold;
    const std::int64_t stride = p.m > 1 ? p.d_rows.inner_stride : round_up_8(p.n);
    // At the end of a row of D, a box would write a whole vector of 16 bytes, which may reach into other data.
    const bool whole_vectors = p.n * size_of(p.d_dtype) % 16 == 0;
    g.box_stores =
        g.vector_stores && whole_vectors && (kInRegisters || g.chunks == 1) && stride < std::int64_t{1} << 36;
    if (g.box_stores) map_d = tensor_map(p.d, p.d_dtype, p.m, p.n, stride, kStoreBoxRows);
  }
  constexpr bool kWide = !Tile::kTransposed && Tile::kBN >= 192;
  g.group_a = kWide ? wave_height(clusters_at_once, g.tiles_a, Tile::kBM * plan.cluster, Tile::kBN) : 8;
  if constexpr (Tile::kCopies) {
    g.prefetched_steps = 0;  // the copy of the weights may still be incomplete
    g.copies = copied_operands(p, g, clusters_at_once);
  }
  auto* kernel = gemm_sm90_kernel<T, Tile>;
  const int memory = allow_shared_memory<gemm_sm90_kernel<T, Tile>>();
  g.stages = std::min(kMaxStages, (memory - Tile::kFixedBytes) / Tile::kStageBytes);
  const std::int64_t wanted = std::int64_t{g.tiles_a} * g.tiles_b;
  RLK_CHECK(wanted < std::int64_t{1} << 31, "linear: fewer than 2^31 tiles");
  const int clusters = std::max(1, std::min(static_cast<int>(wanted), clusters_at_once));
  launch_dependent_clusters<true>(kernel, plan.cluster, clusters * plan.cluster, Tile::kThreads,
                                  Tile::kFixedBytes + g.stages * Tile::kStageBytes, stream, map_a, map_last_a, map_b,
                                  map_last_b, map_d, g);
}

template <class T, int kTiles>
void run_small_m(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  const CUtensorMap weight = map_of(p.b, p.dtype, p.n, p.contraction, plan.tile_m, L2Reads::k128Bytes);
  const CUtensorMap x = map_of(p.a, p.dtype, p.m, p.contraction, 8 * kTiles, L2Reads::k128Bytes);
  SmallMLaunch launch{launch_of(p, kSmallMStageK, plan.tile_m), plan.tile_m,
                      static_cast<int>((p.n + plan.tile_m - 1) / plan.tile_m)};
  auto* kernel = gemm_small_m_sm90_kernel<T, kTiles>;
  const int memory = allow_shared_memory<gemm_small_m_sm90_kernel<T, kTiles>>();
  const int stage = small_m_stage_bytes(plan.tile_m, 8 * kTiles), fixed = small_m_fixed_bytes(plan.tile_m);
  launch.gemm.stages = std::min({kSmallMMaxStages, (memory - fixed) / stage, (plan.tile_m / 16 + 1) * 32});
  launch_dependent<true>(kernel, std::min(launch.slices, multiprocessors(current_device())),
                         (plan.tile_m / 16 + 1) * 32, fixed + launch.gemm.stages * stage, stream, weight, x, launch);
}

// Both run_tiled_plan functions return false if no kernel is built for the plan.
template <class T, class... Tiles>
bool run_tiled_plan(TileList<Tiles...>, const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  return ((fits<Tiles>(p, plan) && (run_tiles<T, Tiles>(p, plan, stream), true)) || ...);
}
template <class T>
bool run_plan(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  if (plan.small_m) {
    if (plan.tile_n == 8) run_small_m<T, 1>(p, plan, stream);
    if (plan.tile_n == 16) run_small_m<T, 2>(p, plan, stream);
    if (plan.tile_n == 32) run_small_m<T, 4>(p, plan, stream);
    return plan.tile_n == 8 || plan.tile_n == 16 || plan.tile_n == 32;
  }
  return run_tiled_plan<T>(BuiltTiles{}, p, plan, stream);
}

}  // namespace rlk::cuda
