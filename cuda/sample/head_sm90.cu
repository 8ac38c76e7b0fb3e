// The launches of linear_sample for few rows on compute capability 9.0. CMake compiles this file once per
// operand type.

#include <algorithm>

#include "../common/kernel_memory.h"
#include "../linear_logprob/head_plan.h"
#include "head_draw.cuh"
#include "head_leaves_sm90.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

inline LeafLaunch leaf_launch(const LinearParams& product, const SampleParams& draw) {
  LogprobInput columns;
  columns.vocab_size = columns.num_columns = draw.vocab_size;
  columns.valid_vocab = draw.valid_vocab;
  LeafLaunch g{};
  g.columns = head_columns(columns);
  g.leaves_per_part = std::max(1, (g.columns.longest + kLeafColumns - 1) / kLeafColumns);
  g.leaves = kNumParts * g.leaves_per_part;
  g.height = leaf_height(draw.vocab_size);
  g.nodes = sample_chunk(draw, 0, draw.workspace).nodes;
  g.row_floats = sample_node_floats(draw.vocab_size);
  g.bias = product.bias;
  g.bias_dtype = product.bias_dtype;
  g.logits_dtype = product.out_dtype;
  g.rows = static_cast<int>(product.num_rows);
  g.last_rows = last_tile(g.rows, LeafTile::kBM);
  for (int i = 0; i < kNumParts; ++i) {  // columns of the widest of the parts' last leaves
    const int last = last_tile(g.columns.part_last[i] - g.columns.part_first[i], kLeafColumns);
    g.last_columns = std::max(g.last_columns, last);
  }
  g.k_steps = head_steps(product.in_features);
  g.prefetched_steps = std::min(g.k_steps, 2);
  return g;
}

template <class T, Exp kExp>
void run_fused(const LinearParams& product, const SampleParams& draw, cudaStream_t stream) {
  using Tile = LeafTile;
  const LeafLaunch g = leaf_launch(product, draw);
  const HeadMaps maps =
      head_maps(product.dtype, product.in_features,
                {product.x, product.num_rows, product.x_rows.inner_stride, Tile::kBM, g.last_rows},
                {product.weight, product.out_features, product.weight_stride, kLeafColumns, g.last_columns});
  auto* kernel = linear_sample_leaves_sm90_kernel<T, kExp>;
  allow_shared_memory<linear_sample_leaves_sm90_kernel<T, kExp>>();
  launch_dependent<true>(kernel, std::min(multiprocessors(current_device()), g.leaves), Tile::kThreads,
                         Tile::kFixedBytes + Tile::kStages * Tile::kStageBytes, stream, maps, draw, g);
  launch_dependent<true>(linear_sample_draw_kernel, g.rows, kHeadDrawThreads, 0, stream, draw,
                         static_cast<const float*>(g.nodes), g.row_floats);
}

}  // namespace

template <class T>
void run_fused_rows(const LinearParams& product, const SampleParams& draw, cudaStream_t stream) {
  draw.exp == Exp::kHardware ? run_fused<T, Exp::kHardware>(product, draw, stream)
                             : run_fused<T, Exp::kPortable>(product, draw, stream);
}

template void run_fused_rows<RLK_PART>(const LinearParams&, const SampleParams&, cudaStream_t);

}  // namespace rlk::cuda
