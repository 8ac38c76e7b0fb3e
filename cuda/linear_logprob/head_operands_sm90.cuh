// Loads a head's operands by TMA on compute capability 9.0: hidden states and weights. With LoRA, stages of u and
// lora_b follow in the same ring, and their products add to the same accumulators.
#pragma once

#include <cstdint>

#include "../common/tensor_map.h"
#include "../common/tile_ring_sm90.cuh"
#include "kernels/rows/row_pitch.h"
#include "kernels/vocabulary/scored_groups.h"
#include "rlk/ops/linear_logprob.h"

namespace rlk::cuda {

// Tensor maps of one contraction. A box of the `last` maps has the rows of the last tile, and a box of group_x has the
// rows of one group.
struct HeadMaps {
  CUtensorMap x, last_x, group_x, w, last_w;
};

// Rows of a tile of hidden states. If `count` is 0, the tile begins at row `first`, and `left` rows exist from there
// on. Otherwise the rows are `count` groups at any position. Kernels look up all groups before a tile's first stage,
// because a look-up for each box made the kernel a seventh slower.
template <int kRows>
struct TileRows {
  static constexpr int kGroups = kRows / kScoredGroupRows;
  int first, left, count = 0;
  std::uint32_t pairs[kGroups / 2] = {};  // pairs of groups, 16 bits each: a loader has 40 registers
};

// Replaces `Portion` (tile_ring_sm90.cuh) for rows in groups, and loads one box per group.
template <int kRows>
struct GroupsPortion {
  const CUtensorMap* map;
  const TileRows<kRows>& rows;
  int bytes;
  __device__ __forceinline__ void load(std::uint32_t shared, int, int k, std::uint32_t barrier) const {
#pragma unroll
    for (int i = 0; i < TileRows<kRows>::kGroups; ++i) {
      const int group = static_cast<int>(rows.pairs[i / 2] >> i % 2 * 16 & 0xffff);
      if (i < rows.count) {
        load_box(shared + i * kScoredGroupRows * 128, map, k, group * kScoredGroupRows, barrier);
      }
    }
  }
};

// Loads the stages of a tile, for the given rows and the columns from `column` on. All lanes of a warp call this
// function. `last_rows`, `last_columns`: sizes of the last tiles. kWeightsPass: L2 evicts weights before hidden states,
// because the next tiles load the hidden states again.
template <int kRows, int kColumns, bool kWeightsPass = false, class Ring>
__device__ __forceinline__ void load_stages(Ring* ring, const HeadMaps& maps, int steps, const TileRows<kRows>& rows,
                                            int last_rows, int column, int columns_left, int last_columns) {
  const Portion<kColumns, false, kWeightsPass> w(&maps.w, &maps.last_w, last_columns, columns_left, 1, 0);
  if (rows.count > 0) {
    const GroupsPortion<kRows> x{&maps.group_x, rows, rows.count * kScoredGroupRows * 128};
#pragma unroll 1
    for (int k = 0; k < steps; ++k) ring->load(x, w, 0, column, k);
    return;
  }
  const Portion<kRows, false> x(&maps.x, &maps.last_x, last_rows, rows.left, 1, 0);
#pragma unroll 1
  for (int k = 0; k < steps; ++k) ring->load(x, w, rows.first, column, k);
}

// Number of stages that hold `count` contraction indices.
inline int head_steps(std::int64_t count) { return static_cast<int>((count + kBoxK - 1) / kBoxK); }

// Rows of the last tile, rounded up to a multiple of 8; 0 if all tiles are full.
inline int last_tile(int rows, int tile) { return static_cast<int>(round_up_8(rows % tile)); }

struct HeadOperand {
  const void* data;
  std::int64_t rows, stride;
  int tile, last;  // rows of a tile; rows of the last tile, or 0 if it is full
};
inline HeadMaps head_maps(DType dtype, std::int64_t contraction, const HeadOperand& x, const HeadOperand& w) {
  // If one tile holds all rows of x, each weight is read only once.
  const L2Reads reads = x.rows <= x.tile ? L2Reads::k128Bytes : L2Reads::k256Bytes;
  const auto map = [&](const HeadOperand& o, int box_rows) {
    // The stride of a single row has no meaning, and TMA may refuse it.
    const std::int64_t stride = o.rows > 1 ? o.stride : round_up_8(contraction);
    return tensor_map(o.data, dtype, o.rows, contraction, stride, box_rows, reads);
  };
  HeadMaps maps;
  maps.x = map(x, x.tile);
  maps.last_x = x.last == 0 ? maps.x : map(x, x.last);
  maps.group_x = map(x, kScoredGroupRows);
  maps.w = map(w, w.tile);
  maps.last_w = w.last == 0 ? maps.w : map(w, w.last);
  return maps;
}

// `head` has the maps of hidden states and weights. `lora` has the maps of lora_b and of u, whose rows of lora_rank
// elements are contiguous. Without LoRA, `lora` equals `head`.
struct AllHeadMaps {
  HeadMaps head, lora;
};
inline AllHeadMaps all_head_maps(const Head& head, const void* u, HeadOperand x, HeadOperand w) {
  x.data = head.hidden, x.stride = head.hidden_rows.inner_stride;
  w.data = head.weight, w.stride = head.weight_stride;
  const HeadMaps maps = head_maps(head.dtype, head.in_features, x, w);
  if (head.lora_rank == 0) return {maps, maps};
  x.data = u, x.stride = head.lora_rank;
  w.data = head.lora_b, w.stride = head.lora_b_stride;
  return {maps, head_maps(head.dtype, head.lora_rank, x, w)};
}

}  // namespace rlk::cuda
