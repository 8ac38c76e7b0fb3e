// The launches of linear_logprob on compute capability 9.0. CMake compiles this file once per operand
// type.

#include <type_traits>

#include "../common/alignment.h"
#include "../common/kernel_memory.h"
#include "forward_sm90.cuh"
#include "head_plan.h"
#include "kernels.h"
#include "row_outputs.cuh"
#include "small_m_sm90.cuh"

namespace rlk::cuda {

// Arguments of both kernels, for tiles of `tile_rows` by `tile_columns`.
inline HeadLaunch head_launch(const LinearLogprobParams& p, int tile_rows, int tile_columns, int blocks) {
  HeadLaunch g{};
  g.columns = head_columns(p);
  g.row_blocks = static_cast<int>((p.num_rows + tile_rows - 1) / tile_rows);
  g.blocks = blocks;
  g.bias = p.head.bias;
  g.bias_dtype = p.head.bias_dtype;
  g.target = p.target;
  g.target_dtype = p.target_dtype;
  g.target_stride = p.target_rows.inner_stride;
  g.temperature = p.temperature;
  g.temperature_value = p.temperature_value;
  g.vocab_start = p.vocab_start;
  g.logit_scale = p.logit_scale;
  g.softcap = p.softcap;
  g.inverse_softcap = p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f;
  g.logits_dtype = p.dtype;
  g.rows = static_cast<int>(p.num_rows);
  g.padded_rows = g.row_blocks * tile_rows;
  g.lora_steps = head_steps(p.head.lora_rank);
  g.k_steps = head_steps(p.head.in_features) + g.lora_steps;
  g.last_rows = last_tile(g.rows, tile_rows);
  for (int i = 0; i < g.columns.num_parts; ++i) {  // columns of the widest of the parts' last tiles
    const int columns = g.columns.part_last[i] - g.columns.part_first[i];
    g.last_columns = std::max(g.last_columns, last_tile(columns, tile_columns));
  }
  return g;
}

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits>
void run_small_m(const LinearLogprobParams& p, const void* u, cudaStream_t stream) {
  using Tile = SmallMTile;
  const int blocks = multiprocessors(current_device());
  HeadLaunch g = head_launch(p, kSmallM, kHeadTileColumns, blocks);
  const HeadWorkspace workspace = head_workspace(g.columns, blocks);
  RLK_CHECK(workspace.bytes <= p.workspace_bytes, "linear_logprob: a workspace that serves every launch");
  auto* const memory = static_cast<unsigned char*>(p.workspace);
  g.target_z = reinterpret_cast<float*>(memory);
  g.nodes = memory + workspace.nodes;
  g.tile_nodes = memory + workspace.tile_nodes;
  const AllHeadMaps maps = all_head_maps(p.head, u, {nullptr, p.num_rows, 0, kSmallM, g.last_rows},
                                         {nullptr, p.num_columns, 0, kHeadTileColumns, g.last_columns});
  auto* kernel = linear_logprob_small_m_sm90_kernel<T, kExp, kMoments, kLogits>;
  const int shared = allow_shared_memory<linear_logprob_small_m_sm90_kernel<T, kExp, kMoments, kLogits>>();
  g.stages = std::min(kMaxStages, (shared - Tile::kFixedBytes) / Tile::kStageBytes);
  const HeadItems items = head_items(g.columns, blocks);
  launch_dependent<true>(kernel, std::min(blocks, head_work_items(items)), Tile::kThreads,
                         Tile::kFixedBytes + g.stages * Tile::kStageBytes, stream, maps.head, maps.lora, g);
  const HeadNodes nodes{
      g.columns,    static_cast<const float4*>(g.nodes), static_cast<const float4*>(g.tile_nodes), g.target_z, items,
      g.padded_rows};
  const LogprobParams& row_params = p;
  launch_dependent<true>(linear_logprob_few_roots_kernel<kMoments>, g.rows, kWarpsOfSmallM * kWarp, 0, stream,
                         row_params, nodes);
}

template <class T, Exp kExp, bool kMoments, HeadLogits kLogits>
void run_head(const LinearLogprobParams& p, const void* u, cudaStream_t stream) {
  using Tile = PairTile;
  using Node = NodeOf<kMoments>;
  const int blocks = multiprocessors(current_device());
  HeadLaunch g = head_launch(p, kPairRows, kPairTileColumns, blocks);
  const PairWorkspace workspace = pair_workspace(g.columns, g.row_blocks, blocks, sizeof(Node));
  RLK_CHECK(workspace.bytes <= p.workspace_bytes, "linear_logprob: a workspace that serves every launch");
  auto* const memory = static_cast<unsigned char*>(p.workspace);
  if (g.row_blocks > 1) {  // a single block of rows computes all rows
    auto* const groups = reinterpret_cast<ScoredGroups*>(memory);
    sm90::find_scored_groups(p, groups, stream);
    g.groups = groups;
  }
  g.target_z = reinterpret_cast<float*>(memory + workspace.target_z);
  g.nodes = memory + workspace.nodes;
  g.tile_nodes = memory + workspace.pair_nodes;
  const AllHeadMaps maps = all_head_maps(p.head, u, {nullptr, p.num_rows, 0, kPairRows, g.last_rows},
                                         {nullptr, p.num_columns, 0, kPairTileColumns, g.last_columns});
  auto* kernel = linear_logprob_sm90_kernel<T, kExp, kMoments, kLogits>;
  const int shared = allow_shared_memory<linear_logprob_sm90_kernel<T, kExp, kMoments, kLogits>>();
  g.stages = std::min(kMaxStages, (shared - kPairFixedBytes<kMoments>) / Tile::kStageBytes);
  launch_dependent<true>(kernel, std::min(blocks, pair_work_items(pair_items(g.columns, g.row_blocks, blocks))),
                         Tile::kThreads, kPairFixedBytes<kMoments> + g.stages * Tile::kStageBytes, stream, maps.head,
                         maps.lora, g);
  const PairNodes<kMoments> nodes{g.columns,
                                  g.groups,
                                  static_cast<const Node*>(g.nodes),
                                  static_cast<const Node*>(g.tile_nodes),
                                  g.target_z,
                                  g.row_blocks,
                                  blocks,
                                  g.padded_rows};
  const LogprobParams& row_params = p;
  launch_dependent<true>(linear_logprob_roots_kernel<kMoments>, (g.rows + kRootWarps - 1) / kRootWarps,
                         kRootWarps * kWarp, 0, stream, row_params, nodes);
}

// Chooses among the kernels that are built.
template <class T, Exp kExp, bool kMoments, HeadLogits kLogits>
void run_rows(const LinearLogprobParams& p, const void* u, cudaStream_t stream) {
  constexpr bool kSmallMToo = !kMoments || (kLogits != HeadLogits::kRounded &&
                                            (kExp == Exp::kHardware || kLogits == HeadLogits::kPlain));  // is_small_m
  if constexpr (kSmallMToo) {
    if (is_small_m(p, p.num_rows)) return run_small_m<T, kExp, kMoments, kLogits>(p, u, stream);
  }
  run_head<T, kExp, kMoments, kLogits>(p, u, stream);
}

template <class T>
void run_heads(const LinearLogprobParams& p, const void* u, cudaStream_t stream) {
  const auto run = [&](auto exp, auto logits) {
    constexpr Exp kExp = decltype(exp)::value;
    constexpr HeadLogits kLogits = decltype(logits)::value;
    has_moments(p) ? run_rows<T, kExp, true, kLogits>(p, u, stream) : run_rows<T, kExp, false, kLogits>(p, u, stream);
  };
  using Plain = std::integral_constant<HeadLogits, HeadLogits::kPlain>;
  using Rounded = std::integral_constant<HeadLogits, HeadLogits::kRounded>;
  using General = std::integral_constant<HeadLogits, HeadLogits::kGeneral>;
  using Hardware = std::integral_constant<Exp, Exp::kHardware>;
  using Portable = std::integral_constant<Exp, Exp::kPortable>;
  const bool plain = has_bare_logits(p) && p.dtype == DType::kFloat32;
  if (p.exp == Exp::kPortable) return plain ? run(Portable{}, Plain{}) : run(Portable{}, General{});
  if (plain) return run(Hardware{}, Plain{});
  if constexpr (std::is_same_v<T, Bf16>) {
    if (has_bare_logits(p) && p.dtype == DType::kBFloat16) return run(Hardware{}, Rounded{});
  }
  run(Hardware{}, General{});
}

template void run_heads<RLK_PART>(const LinearLogprobParams&, const void*, cudaStream_t);

}  // namespace rlk::cuda
