// How a call of linear_logprob becomes launches on compute capability 9.0. One form of the logits a translation unit.
#pragma once

#include <type_traits>

#include "../common/alignment.h"
#include "../common/kernel_memory.h"
#include "../common/tensor_map.h"
#include "forward_sm90.cuh"
#include "head_plan.h"
#include "roots.cuh"

namespace rlk::cuda {

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits, int kM>
void run_head(const LinearLogprobParams& p, cudaStream_t stream) {
  using Tile = HeadTile<kM>;
  const int blocks = multiprocessors(current_device());
  HeadLaunch g{};
  g.grid = head_grid(p, kM, blocks);
  const HeadWorkspace workspace = head_workspace(g.grid, p.num_rows, kM);
  auto* const memory = static_cast<unsigned char*>(p.workspace);
  g.target_z = reinterpret_cast<float*>(memory);
  g.nodes = reinterpret_cast<float4*>(memory + workspace.nodes);
  g.tile_nodes = reinterpret_cast<float4*>(memory + workspace.tile_nodes);
  g.bias = p.head.bias;
  g.bias_dtype = p.head.bias_dtype;
  g.target = p.target;
  g.target_dtype = p.target_dtype;
  g.target_stride = p.target_rows.inner_stride;
  g.temperature = p.temperature;
  g.temperature_value = p.temperature_value;
  g.vocab_start = p.vocab_start;
  g.ignore_index = p.ignore_index;
  g.logit_scale = p.logit_scale;
  g.softcap = p.softcap;
  g.inverse_softcap = p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f;
  g.logits_dtype = p.dtype;
  g.rows = static_cast<int>(p.num_rows);
  g.padded_rows = g.grid.row_blocks * kM;
  g.k_steps = static_cast<int>((p.head.in_features + kBoxK - 1) / kBoxK);
  g.last_rows = (g.rows % kM + 7) / 8 * 8;
  for (int i = 0; i < g.grid.num_parts; ++i) {  // the widest of the parts' last tiles
    const int columns = g.grid.part_last[i] - g.grid.part_first[i];
    g.last_columns = std::max(g.last_columns, (columns % kHeadTileColumns + 7) / 8 * 8);
  }
  const auto map = [&](const void* data, std::int64_t rows, std::int64_t stride, int box_rows) {
    return tensor_map(data, p.head.dtype, rows, p.head.in_features,
                      rows > 1 ? stride : (p.head.in_features + 7) / 8 * 8, box_rows);
  };
  const CUtensorMap x = map(p.head.hidden, p.num_rows, p.head.hidden_rows.inner_stride, kM);
  const CUtensorMap last_x =
      g.last_rows == 0 ? x : map(p.head.hidden, p.num_rows, p.head.hidden_rows.inner_stride, g.last_rows);
  const CUtensorMap w = map(p.head.weight, p.num_columns, p.head.weight_stride, kHeadTileColumns);
  const CUtensorMap last_w =
      g.last_columns == 0 ? w : map(p.head.weight, p.num_columns, p.head.weight_stride, g.last_columns);
  auto* kernel = linear_logprob_sm90_kernel<T, kExp, kMoments, kLogits, kM>;
  const int shared = allow_shared_memory<linear_logprob_sm90_kernel<T, kExp, kMoments, kLogits, kM>>();
  g.stages = std::min(kMaxStages, (shared - Tile::kFixedBytes) / Tile::kStageBytes);
  launch_dependent<true>(kernel, std::min(blocks, head_work_items(g.grid)), Tile::kThreads,
                         Tile::kFixedBytes + g.stages * Tile::kStageBytes, stream, x, last_x, w, last_w, g);
  const HeadNodes nodes{g.grid, g.nodes, g.tile_nodes, g.target_z, g.padded_rows, kM};
  launch_dependent<true>(linear_logprob_roots_kernel<kMoments>, (g.rows + kRootWarps - 1) / kRootWarps,
                         kRootWarps * kWarp, 0, stream, static_cast<const LogprobParams&>(p), nodes);
}

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits>
void run_rows(const LinearLogprobParams& p, cudaStream_t stream) {
  if constexpr (!(kMoments && kLogits == HeadLogits::kRounded)) {
    if (head_block_rows(p, p.num_rows) == 64) return run_head<T, kExp, kMoments, kLogits, 64>(p, stream);
  }
  run_head<T, kExp, kMoments, kLogits, 128>(p, stream);
}

// The forms that are built. Registers have no room for the portable exponential beside moments and transformed logits:
// fuses_linear_logprob refuses these.
template <class T>
void run_heads(const LinearLogprobParams& p, cudaStream_t stream) {
  using Plain = std::integral_constant<HeadLogits, HeadLogits::kPlain>;
  using Rounded = std::integral_constant<HeadLogits, HeadLogits::kRounded>;
  using General = std::integral_constant<HeadLogits, HeadLogits::kGeneral>;
  const auto hardware = [&](auto logits) {
    constexpr HeadLogits kLogits = decltype(logits)::value;
    has_moments(p) ? run_rows<T, Exp::kHardware, true, kLogits>(p, stream)
                   : run_rows<T, Exp::kHardware, false, kLogits>(p, stream);
  };
  const bool plain = has_bare_logits(p) && p.dtype == DType::kFloat32;
  if (p.exp == Exp::kPortable) {
    if (has_moments(p)) return run_rows<T, Exp::kPortable, true, HeadLogits::kPlain>(p, stream);
    return plain ? run_rows<T, Exp::kPortable, false, HeadLogits::kPlain>(p, stream)
                 : run_rows<T, Exp::kPortable, false, HeadLogits::kGeneral>(p, stream);
  }
  if (plain) return hardware(Plain{});
  if constexpr (std::is_same_v<T, Bf16>) {
    if (has_bare_logits(p)) return hardware(Rounded{});
  }
  hardware(General{});
}

}  // namespace rlk::cuda
