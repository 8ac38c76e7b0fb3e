// The kernel of a row per cluster (cluster_row_sm90.cuh), and which calls it serves.
#pragma once

#include <array>
#include <atomic>

#include "../common/launch.h"
#include "cluster_row_sm90.cuh"

namespace rlk::cuda {
namespace {

template <class T, Exp kExp>
__global__ void __launch_bounds__(kRowGroups* kGroupThreads, 1)
    sample_cluster_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ GroupGrid grid,
                          const __grid_constant__ SampleChunk chunk, const __grid_constant__ int height) {
  __shared__ ClusterShared s;
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kDigitBins; i += threads) s.bins[i] = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kMostSlots / kWarp; i += threads) {
    s.roots[i] = make_float2(-infinity(), 0.0f);
  }
  if (threadIdx.x == 0) s.num_found = 0;
  ClusterRow<T, kExp> row(p, grid, chunk, height, &s);
  cluster_arrive();
  wait_for_previous_kernel();
  allow_next_kernel();
  row.run();
}

// Whether the device can hold a cluster of this kernel.
template <class T, Exp kExp>
bool holds_clusters() {
  static std::array<std::atomic<int>, kMaxDevices> known{};  // 1: no, 2: yes
  const int device = current_device();
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("CUDA device index " + std::to_string(device));
  int state = known[device].load(std::memory_order_relaxed);
  if (state == 0) {
    auto* const kernel = sample_cluster_kernel<T, kExp>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "size of clusters");
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {kRowBlocks, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = kRowBlocks;
    config.blockDim = kRowGroups * kGroupThreads;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "clusters of a device");
    state = clusters > 0 ? 2 : 1;
    known[device].store(state, std::memory_order_relaxed);
  }
  return state == 2;
}

// Computes a call of few rows that top_p alone cuts. Returns whether it does: not with other cuts, the n best or greedy
// rows, nor for a vocabulary of which a group has several parts, or which is too large.
template <class T, Exp kExp>
bool run_cluster_rows(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  const bool by_top_p = p.top_p.data != nullptr || p.top_p.value != 1.0f;
  const bool others = p.top_k.data != nullptr || p.top_k.value != 0 || p.min_p.data != nullptr || p.min_p.value != 0.0f;
  if (!by_top_p || others || p.greedy || p.is_greedy != nullptr || p.top_ids != nullptr || chunk.rows > kClusterRows ||
      chunk.rows != p.num_rows || grid.groups_per_part == 0 || grid.groups > kRowBlocks * kRowGroups ||
      !holds_clusters<T, kExp>()) {
    return false;
  }
  if (chunk.rows > 1 && p.kept_offsets != nullptr) {
    check(cudaMemsetAsync(chunk.states, 0, static_cast<std::size_t>(chunk.rows) * sizeof *chunk.states, stream),
          "clearing of counts");
  }
  const int groups = (grid.groups + kRowBlocks - 1) / kRowBlocks;
  launch_dependent_clusters<true>(sample_cluster_kernel<T, kExp>, kRowBlocks, static_cast<int>(chunk.rows) * kRowBlocks,
                                  groups * kGroupThreads, 0, stream, p, grid, chunk, leaf_height(p.vocab_size));
  return true;
}

}  // namespace
}  // namespace rlk::cuda
