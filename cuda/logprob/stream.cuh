// Forward for many rows: persistent blocks whose warps each stream groups of 32 leaves through a buffer of their own
// in shared memory, so that some warps load while others compute. Warps claim their tasks one by one, since
// multiprocessors do not all get the same share of the memory's bandwidth; the warp that completes a row takes its
// root. No barrier between warps, no fence. One body for every architecture; each gets its own machine code.
#pragma once

#include <algorithm>
#include <bit>

#include "../common/kernel_memory.h"
#include "../common/relaxed_atomics.cuh"
#include "leaf_group.cuh"

namespace rlk::cuda {
namespace {  // one copy per architecture

// A launch's share of the call, and where its warps leave what concerns several of them. That memory begins as ones in
// all bits: a counter before 0, a node that no node looks like.
struct StreamWork {
  std::int64_t first_row;
  int rows;
  int tasks_log2;        // of a row: a part, in steps of a group each, or a group of several short parts
  int steps;             // of a task
  unsigned* claims;      // tasks claimed beyond the first two of each warp
  unsigned* tasks_done;  // per row
  float4* nodes;         // per task
};

// Leaves a task's node for the root; true in the warp that came last of the row's, which gets them all, one a lane. The
// last ones may still be on their way: their words tell.
__device__ __forceinline__ bool post_node(const StreamWork& work, int task, SoftmaxStats* node, int lane) {
  const int tasks = 1 << work.tasks_log2, row = task >> work.tasks_log2;
  if (tasks == 1) return true;
  unsigned earlier = 0;
  if (lane == 0) {
    store_relaxed(work.nodes + task, node->m, node->S, node->E, node->Q);
    earlier = fetch_increment(work.tasks_done + row) + 1;
  }
  if (__shfl_sync(kAllLanes, earlier, 0) + 1 != static_cast<unsigned>(tasks)) return false;
  *node = identity_stats();
  if (lane < tasks) {
    const auto missing = [](float word) { return bits_of(word) == -1; };
    float4 n;
    do {
      n = load_relaxed(work.nodes + (row << work.tasks_log2) + lane);
    } while (missing(n.x) || missing(n.y) || missing(n.z) || missing(n.w));
    *node = {n.x, n.y, n.z, n.w};
  }
  __syncwarp();
  return true;
}

template <class T, Exp kExp, bool kMoments, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, 1)
    logprob_stream_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid,
                          const __grid_constant__ StreamWork work) {
  extern __shared__ __align__(128) unsigned char shared[];  // [tiles of each warp][bitmap of each warp]
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto* tiles = reinterpret_cast<uint4*>(shared + warp * kGroupBytes<T>);
  auto* bitmap = reinterpret_cast<std::uint32_t*>(shared + kWarps * kGroupBytes<T>) + warp * kKeptWords;
  const int total = work.rows << work.tasks_log2;
  const auto row_of_task = [&](int task) { return work.first_row + (task >> work.tasks_log2); };
  const auto target_of_task = [&](int task) { return task < total ? target_of(p, row_of_task(task)) : p.ignore_index; };

  // What is being copied, or computed once it has arrived: a group of row `logits`, unless that row is ignored.
  const typename T::Storage* logits = nullptr;
  LeafSpan span{};
  std::int64_t target = 0;
  const auto begin = [&](int task, std::int64_t its_target) {
    target = its_target;
    logits = row_of<T>(p, row_of_task(task)) - p.vocab_start;
    span = leaf_span(grid, task & ((1 << work.tasks_log2) - 1), 0, lane);
  };
  const auto copy = [&] {
    if (target != p.ignore_index) start_group<T>(logits, grid, span, tiles, lane);
  };

  const int warps = kWarps * static_cast<int>(gridDim.x);
  int now = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x), next = now + warps;
  begin(now, target_of_task(now));
  copy();
#pragma unroll 1
  while (now < total) {
    // What the next two tasks need is asked for now, so that no copy has to wait for it.
    unsigned claimed = 0;
    if (lane == 0) claimed = fetch_increment(work.claims);
    const std::int64_t next_target = target_of_task(next);
    const RowHead head = row_head(row_of_task(now), target, temperature_of(p, row_of_task(now)));
    const bool ignored = target == p.ignore_index;
    const int shift = shift_of<T>(logits);
    SoftmaxStats node = identity_stats();  // lane i: of step i
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      SoftmaxStats leaf = identity_stats();
      std::int32_t failed = 0;
      if (!ignored) {
        copy_async_wait_all();
        __syncwarp();
        leaf = leaf_of_group<T, kExp, kMoments>(p, grid, head, span, tiles, shift, bitmap, &failed, lane);
        __syncwarp();
      }
      if (step + 1 < work.steps) {
        span.next_group();
      } else {
        begin(next, next_target);
      }
      copy();
      leaf = group_node<kMoments>(leaf, failed);
      if (lane == step) node = leaf;
    }
    if (work.steps > 1) node = tree_over_lanes<kMoments>(node);
    if (post_node(work, now, &node, lane)) {
      const SoftmaxStats root = tree_over_lanes<kMoments>(node);
      if (lane == 0) {
        ignored ? write_ignored(p, head.row) : write_outputs(p, head.row, root, target_z<T>(p, head.row, head.target));
      }
      __syncwarp();
    }
    now = next;
    next = 2 * warps + 1 + static_cast<int>(__shfl_sync(kAllLanes, claimed, 0));
  }
}

template <class T, Exp kExp, bool kMoments, int kWarps>
void run_stream(const LogprobParams& p, const GroupGrid& grid, int blocks, cudaStream_t stream) {
  const int bytes = kWarps * (kGroupBytes<T> + (p.kept_offsets ? kKeptWords * 4 : 0));
  auto* kernel = logprob_stream_kernel<T, kExp, kMoments, kWarps>;
  allow_shared_memory<logprob_stream_kernel<T, kExp, kMoments, kWarps>>();
  const int tasks = stream_tasks(grid);
  for (std::int64_t first = 0; first < p.num_rows; first += kStreamRows) {
    const std::int64_t rows = std::min(p.num_rows - first, kStreamRows);
    auto* counters = static_cast<unsigned*>(p.workspace);
    const StreamWork work{first,
                          static_cast<int>(rows),
                          std::countr_zero(static_cast<unsigned>(tasks)),
                          std::max(grid.groups_per_part, 1),
                          counters,
                          counters + 4,
                          reinterpret_cast<float4*>(counters + stream_counters(rows))};
    check(cudaMemsetAsync(counters, 0xff, stream_bytes(grid, rows), stream), "workspace of logprob");
    kernel<<<blocks, kWarps * kWarp, bytes, stream>>>(p, grid, work);
  }
  check(cudaGetLastError(), "launch of logprob_stream");
}

}  // namespace
}  // namespace rlk::cuda
