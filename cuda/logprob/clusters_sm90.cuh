// logprob of few rows on SM90. Each cluster computes one row. A row's statistics are combined by a binary tree. The
// cluster's warps compute nodes of this tree and send them to block 0 by asynchronous stores. A call takes one launch
// and no workspace. HBM limits the speed: each logit is read once (vocab_size * sizeof(T) bytes per row). README.md has
// measurements.
#pragma once

#include "../common/cluster_sm90.cuh"
#include "../common/dependent_launch.cuh"
#include "../common/kernel_memory.h"
#include "../common/kernels.h"
#include "../common/mbarrier_sm90.cuh"
#include "kernels/vocabulary/logprob_groups.h"
#include "stream.cuh"

namespace rlk::cuda {
namespace {

constexpr int kClusterBlocks = 8;
constexpr int kClusterWarps = 5;  // 8 blocks of 5 warps take 40 groups of 4096 columns (163,840) in one round

template <class T, Exp kExp, bool kMoments>
__global__ void __launch_bounds__(kClusterWarps* kWarp, 1)
    logprob_cluster_sm90_kernel(const __grid_constant__ LogprobParams p, const __grid_constant__ GroupGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rank = static_cast<int>(cluster_rank());
  const std::int64_t row = blockIdx.x / kClusterBlocks;
  const std::int64_t target = target_of(p, row);
  if (target == p.ignore_index) {  // the condition is the same in all blocks of the cluster
    if (rank == 0 && threadIdx.x == 0) write_ignored(p, row);
    return;
  }
  const float temperature = temperature_of(p, row);
  const auto* logits = row_of<T>(p, row) - p.vocab_start;
  // Shared memory: [image of each warp][nodes and their barrier, used in block 0][bitmap of each warp]
  const std::uint32_t image = shared_address(shared) + warp * kGroupBytes<T>;
  auto* nodes = reinterpret_cast<float4*>(shared + kClusterWarps * kGroupBytes<T>);
  const std::uint32_t nodes_address = shared_address(nodes);
  const std::uint32_t barrier = nodes_address + grid.nodes * 16;
  auto* bitmap = reinterpret_cast<std::uint32_t*>(nodes + grid.nodes + 1) + warp * kKeptWords;
  int index = rank + warp * kClusterBlocks;
  Group group = group_of_row(grid, index < grid.groups ? index : 0);
  GroupCopy<T> copy(logits, grid, group, image, lane);
  if (index < grid.groups) copy.start(image, lane);
  if (rank == 0 && threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_arrive_expect(barrier, grid.groups * 16);
    mbarrier_init_fence();
  }
  __syncwarp();
  cluster_arrive();
  bool waited = false;
  while (index < grid.groups) {
    copy_async_wait_all();
    __syncwarp();
    const std::int32_t failed =
        (is_temperature(temperature) ? kOk : kBadTemperature) |
        prepare_leaf<T>(p, grid, row, group, copy.leaf, copy.leaf_columns, copy.shift(), bitmap, lane);
    const SoftmaxStats node = tree_over_lanes<kMoments>(
        failed ? failed_stats(failed)
               : leaf_stats<T, kExp, kMoments>(copy.leaf, copy.leaf_columns, log2_scale(temperature), p.logit_scale,
                                               p.softcap));
    if (!waited) cluster_wait();
    waited = true;
    if (lane == 0) {
      store_async_16(map_to_rank(nodes_address + node_of_group(grid, group) * 16, 0), node.m, node.S, node.E, node.Q,
                     map_to_rank(barrier, 0));
    }
    __syncwarp();
    index += kClusterBlocks * kClusterWarps;
    if (index < grid.groups) {
      group = group_of_row(grid, index);
      copy = GroupCopy<T>(logits, grid, group, image, lane);
      copy.start(image, lane);
    }
  }
  if (!waited) cluster_wait();
  if (rank == 0 && warp == 0) {
    const float z = target_z<T>(p, row, target);
    mbarrier_wait(barrier, 0);
    const SoftmaxStats root = tree_over_nodes<kMoments>(grid.nodes, lane, [&](int i) {
      if (!is_group_node(grid, i)) return identity_stats();
      const float4 n = nodes[i];
      return SoftmaxStats{n.x, n.y, n.z, n.w};
    });
    if (lane == 0) write_outputs(p, row, root, z);
  }
}

template <class T, Exp kExp, bool kMoments>
void run_clusters(const LogprobParams& p, const GroupGrid& grid, cudaStream_t stream) {
  const int bytes =
      kClusterWarps * (kGroupBytes<T> + (p.kept_offsets ? kKeptWords * 4 : 0)) + (grid.nodes + 1) * kNodeBytes;
  auto* kernel = logprob_cluster_sm90_kernel<T, kExp, kMoments>;
  allow_shared_memory<logprob_cluster_sm90_kernel<T, kExp, kMoments>>();
  launch_dependent_clusters<false>(kernel, kClusterBlocks, static_cast<int>(p.num_rows * kClusterBlocks),
                                   kClusterWarps * kWarp, bytes, stream, p, grid);
}

}  // namespace
}  // namespace rlk::cuda
