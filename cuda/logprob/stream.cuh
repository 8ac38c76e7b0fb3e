// Forward for many rows: persistent blocks whose warps each stream groups of 32 leaves through a ring of their own in
// shared memory, so that loads never pause for arithmetic. The warp that completes a row takes its root. One launch, no
// workspace, no barrier between warps. One body for every architecture; each gets its own machine code.
#pragma once

#include "leaf_group.cuh"

namespace rlk::cuda {

constexpr int kStages = 1;    // groups in flight or in use per warp: more warps serve better than deeper rings
constexpr int kRowSlots = 4;  // rows of a block whose nodes may be incomplete at once

// Walks the tasks of a warp: a task is a part of a row and has a step per group, or a group of several short parts.
struct TaskCursor {
  int row;  // of this block
  int task, step;
};

template <class T, Exp kExp, bool kMoments, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, 1)
    logprob_stream_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // [ring of each warp][nodes of kRowSlots rows][tasks done and rows done of each slot][bitmap of each warp]
  auto* ring = reinterpret_cast<uint4*>(shared + warp * kStages * kGroupBytes<T>);
  auto* nodes = reinterpret_cast<float4*>(shared + kWarps * kStages * kGroupBytes<T>);
  auto* tasks_done = reinterpret_cast<int*>(nodes + kRowSlots * kNumParts);
  auto* rows_done = reinterpret_cast<volatile int*>(tasks_done + kRowSlots);
  auto* bitmap = reinterpret_cast<std::uint32_t*>(tasks_done + 2 * kRowSlots) + warp * kKeptWords;
  if (threadIdx.x < 2 * kRowSlots) tasks_done[threadIdx.x] = 0;
  __syncthreads();

  const int rows = static_cast<int>((p.num_rows - blockIdx.x + gridDim.x - 1) / gridDim.x);
  const int steps = grid.groups_per_part > 0 ? grid.groups_per_part : 1;
  const int tasks = grid.groups / steps;  // of a row, a power of two up to kNumParts
  const auto row_at = [&](int row) { return blockIdx.x + std::int64_t{row} * gridDim.x; };
  const auto next_task = [&](TaskCursor& t) {
    t.step = 0;
    t.task += kWarps;
    t.row += t.task / tasks;
    t.task %= tasks;
  };
  TaskCursor ahead{warp / tasks, warp % tasks, 0};
  std::int64_t target_ahead = ahead.row < rows ? target_of(p, row_at(ahead.row)) : 0;
  int stage_ahead = 0;
  // Starts the next copy. Its row's target was read when the task before it began, so the copy does not wait.
  const auto start_next = [&] {
    if (ahead.row < rows && target_ahead != p.ignore_index) {
      start_group<T>(p, grid, row_at(ahead.row), leaf_span(grid, ahead.task * steps + ahead.step, lane),
                     ring + stage_ahead * (kGroupBytes<T> / 16), lane);
    }
    copy_async_commit();  // also where it is empty: waits count groups
    stage_ahead = stage_ahead + 1 == kStages ? 0 : stage_ahead + 1;
    if (++ahead.step == steps) {
      next_task(ahead);
      if (ahead.row < rows) target_ahead = target_of(p, row_at(ahead.row));
    }
  };
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) start_next();

  int stage = 0;
  for (TaskCursor now{warp / tasks, warp % tasks, 0}; now.row < rows; next_task(now)) {
    const std::int64_t row = row_at(now.row);
    const RowHead head = row_head(p, row);
    const bool ignored = head.target == p.ignore_index;
    SoftmaxStats of_steps = identity_stats();  // lane i keeps step i's node
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      copy_async_wait<kStages - 1>();
      __syncwarp();
      const SoftmaxStats node =
          group_stats<T, kExp, kMoments>(p, grid, head, leaf_span(grid, now.task * steps + step, lane),
                                         ring + stage * (kGroupBytes<T> / 16), bitmap, lane);
      __syncwarp();
      stage = stage + 1 == kStages ? 0 : stage + 1;
      start_next();
      if (lane == step) of_steps = node;
    }
    const SoftmaxStats node = steps > 1 ? tree_over_lanes<kMoments>(of_steps) : of_steps;  // lane 0's counts

    const int slot = now.row % kRowSlots;
    const int earlier = now.row / kRowSlots;  // rows that had this slot before
    float4* row_nodes = nodes + slot * kNumParts;
    int done = 0;
    if (lane == 0) {
      while (rows_done[slot] != earlier) __nanosleep(64);
      row_nodes[now.task] = make_float4(node.m, node.S, node.E, node.Q);
      __threadfence_block();
      done = atomicAdd(&tasks_done[slot], 1) + 1;
    }
    if (__shfl_sync(kAllLanes, done, 0) == tasks) {
      __threadfence_block();
      const float4 n = row_nodes[lane % kNumParts];
      const SoftmaxStats root =
          tree_over_lanes<kMoments>(lane < tasks ? SoftmaxStats{n.x, n.y, n.z, n.w} : identity_stats());
      if (lane == 0) {
        ignored ? write_ignored(p, row) : write_outputs(p, row, root, target_z<T>(p, row, head.target));
        tasks_done[slot] = 0;
        __threadfence_block();
        rows_done[slot] = earlier + 1;
      }
      __syncwarp();
    }
  }
}

template <class T, Exp kExp, bool kMoments, int kWarps>
void run_stream(const LogprobParams& p, const GroupGrid& grid, int blocks, cudaStream_t stream) {
  const int bytes = kWarps * (kStages * kGroupBytes<T> + (p.kept_offsets ? kKeptWords * 4 : 0)) +
                    kRowSlots * (kNumParts * kNodeBytes + 8);
  auto* kernel = logprob_stream_kernel<T, kExp, kMoments, kWarps>;
  allow_shared_memory<logprob_stream_kernel<T, kExp, kMoments, kWarps>>();
  kernel<<<blocks, kWarps * kWarp, bytes, stream>>>(p, grid);
  check(cudaGetLastError(), "launch of logprob_stream");
}

}  // namespace rlk::cuda
