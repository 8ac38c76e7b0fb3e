// The second launch of linear_sample for few rows: a block draws the leaf of a row's token. The first launch has stored
// the node of each leaf, and the column that the draw takes in this leaf. Each warp draws a leaf in some groups of 32
// leaves. One warp then draws one of the groups. The latency of one load limits the speed.
#pragma once

#include "../common/dependent_launch.cuh"
#include "draw.cuh"
#include "first_columns.cuh"

namespace rlk::cuda {
namespace {  // each architecture has its own copy of this code

constexpr int kHeadDrawThreads = 256;
constexpr int kDrawsAtOnce = 4;  // roots per warp whose draws overlap; 32 roots hold 131,072 columns

// Before the previous kernel ends, the block computes everything once from made-up nodes. The first run brings the
// block's instructions into the multiprocessor's cache, from which the stream of weights does not evict them.
__global__ void __launch_bounds__(kHeadDrawThreads)
    linear_sample_draw_kernel(const __grid_constant__ SampleParams p, const float* const all_nodes,
                              const std::int64_t row_floats) {
  constexpr int kWarps = kHeadDrawThreads / kWarp, kMostRoots = kMostSlots / kWarp;
  __shared__ float2 roots[kMostRoots];
  __shared__ float drawn_z[kMostRoots];
  __shared__ int drawn_id[kMostRoots];
  __shared__ std::uint32_t words[kDrawWords];
  __shared__ int cuts[kNumParts + 1];
  const std::int64_t row = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const SlotMap map = SlotMap::make(p, cuts);
  if (threadIdx.x < kDrawWords) {
    words[threadIdx.x] = DrawWords<PlainMemory>(p, row)(draw_word(static_cast<int>(threadIdx.x), map.height));
  }
  const SampleRow want = sample_row_of<PlainMemory>(p, row);
  const int num_slots = kNumParts << map.height, num_roots = (num_slots + kWarp - 1) / kWarp;
  const auto* const nodes = reinterpret_cast<const float2*>(all_nodes + row * row_floats);
  const auto* const columns = nodes + num_slots;  // the drawn column of each leaf, and the column's z
  __syncthreads();
  int passes = 2;
  // Hides the number of passes: the compiler then makes one copy of the code for both passes.
  asm volatile("" : "+r"(passes));
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const bool rehearses = pass == 0;
    if (!rehearses) {
      wait_for_previous_kernel();
      allow_next_kernel();
    }
#pragma unroll 1
    for (int base = warp; base < num_roots; base += kDrawsAtOnce * kWarps) {
      SoftmaxStats node[kDrawsAtOnce];
      float2 column[kDrawsAtOnce];
#pragma unroll
      for (int i = 0; i < kDrawsAtOnce; ++i) {
        const int slot = (base + i * kWarps) * kWarp + lane;
        const bool has = slot < num_slots && map.has_columns(slot), reads = has && !rehearses;
        const float2 x = reads ? nodes[slot] : make_float2(has ? 0.0f : -infinity(), has ? 1.0f : 0.0f);
        column[i] = reads ? columns[slot] : make_float2(0.0f, 0.0f);
        node[i] = {x.x, x.y, 0.0f, 0.0f};
      }
      DrawnLane drawn[kDrawsAtOnce];
      draw_over_lanes(node, 0, words, drawn);
#pragma unroll
      for (int i = 0; i < kDrawsAtOnce; ++i) {
        const int root = base + i * kWarps;
        if (lane != drawn[i].lane || root >= num_roots) continue;
        roots[root] = make_float2(drawn[i].root.m, drawn[i].root.S);
        drawn_z[root] = column[i].x;
        drawn_id[root] = __float_as_int(column[i].y);
      }
    }
    __syncthreads();
    if (warp == 0) {
      const DrawnLane of_roots = draw_over_nodes(
          num_roots,
          [&](int i) {
            const float2 root = i < num_roots ? roots[i] : make_float2(-infinity(), 0.0f);
            return SoftmaxStats{root.x, root.y, 0.0f, 0.0f};
          },
          words);
      const SoftmaxStats root = of_roots.root;
      const int at = min(of_roots.lane, num_roots - 1);  // arbitrary in a row that fails
      const std::int32_t of_root = status_of(root) | (root.m == -infinity() ? kEmptyRow : kOk);
      const std::int32_t status = want.status != kOk ? want.status : of_root;
      const float logprob = logprob_outputs(root, drawn_z[at], want.temperature).logprob;
      if (lane == 0 && !rehearses) {
        p.ids[row] = status == kOk ? drawn_id[at] : -1;
        p.status[row] = status;
        if (p.logprob != nullptr) p.logprob[row] = status == kOk ? logprob : canonical_nan();
      }
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace rlk::cuda
