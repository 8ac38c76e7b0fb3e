// The kernel in which a cluster computes a row (cluster_row_sm90.cuh), and the choice of the calls that run it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>

#include "../common/launch.h"
#include "cluster_row_sm90.cuh"

namespace rlk::cuda {
namespace {

template <class T, Exp kExp, int kBlocks>
__global__ void __launch_bounds__(ClusterShape<kBlocks>::kThreads, ClusterShape<kBlocks>::kResident)
    sample_cluster_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ GroupGrid grid,
                          const __grid_constant__ SampleChunk chunk, const __grid_constant__ int height) {
  extern __shared__ float4 of_cluster[];  // ClusterShared, then the columns
  using Shared = ClusterShared<kBlocks>;
  static_assert(sizeof(Shared) % sizeof(float4) == 0);
  Shared& s = *reinterpret_cast<Shared*>(of_cluster);
  if (threadIdx.x < kMostSlots / kWarp) s.roots[threadIdx.x] = make_float2(-infinity(), 0.0f);
  ClusterRow<T, kExp, kBlocks> row(p, grid, chunk, height, &s);
  row.clear_bins();
  row.find_columns();
  cluster_arrive();
  wait_for_previous_kernel();
  allow_next_kernel();
  row.run();
}

// Clears the counts of kept columns. The cluster kernel begins meanwhile.
constexpr int kClearThreads = 256;
__global__ void __launch_bounds__(kClearThreads) clear_counts_kernel(const __grid_constant__ SampleChunk chunk) {
  allow_next_kernel();
  wait_for_previous_kernel();
  clear_published(chunk);
}

// Bytes of shared memory of a block.
template <int kBlocks>
int cluster_bytes(int groups) {
  using Shape = ClusterShape<kBlocks>;
  const int slots = std::min(Shape::steps(groups), Shape::kSlots);
  return static_cast<int>(sizeof(ClusterShared<kBlocks>)) + slots * Shape::kThreads * kLeafSteps * 4;
}
// How many clusters of this kernel the device holds at once, for rows of `groups` groups; 0 if none.
template <class T, Exp kExp, int kBlocks>
std::int64_t held_clusters(int groups) {
  using Shape = ClusterShape<kBlocks>;
  if (groups > Shape::kMostRowGroups) return 0;
  using OfSteps = std::array<std::atomic<int>, Shape::kSteps>;
  static std::array<OfSteps, kMaxDevices> known{};  // the number of clusters plus one; 0: not known yet
  const int device = current_device();
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("CUDA device index " + std::to_string(device));
  std::atomic<int>& of_device = known[device][Shape::steps(groups) - 1];
  int held = of_device.load(std::memory_order_relaxed);
  if (held == 0) {
    auto* const kernel = sample_cluster_kernel<T, kExp, kBlocks>;
    const int most = cluster_bytes<kBlocks>(Shape::kMostRowGroups);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "size of clusters");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "shared memory of clusters");
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {kBlocks, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = kBlocks;
    config.blockDim = Shape::kThreads;
    config.dynamicSmemBytes = static_cast<std::size_t>(cluster_bytes<kBlocks>(groups));
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "clusters of a device");
    held = clusters + 1;
    of_device.store(held, std::memory_order_relaxed);
  }
  return held - 1;
}
template <class T, Exp kExp, int kBlocks>
void launch_cluster_rows(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  if (chunk.rows > 1 && p.kept_offsets != nullptr) {
    launch_dependent<true>(clear_counts_kernel, 1, kClearThreads, 0, stream, chunk);
  }
  launch_dependent_clusters<true>(sample_cluster_kernel<T, kExp, kBlocks>, kBlocks,
                                  static_cast<int>(chunk.rows) * kBlocks, ClusterShape<kBlocks>::kThreads,
                                  cluster_bytes<kBlocks>(grid.groups), stream, p, grid, chunk,
                                  leaf_height(p.vocab_size));
}

// Blocks per cluster for `rows` rows of `groups` groups; 0 if the scans take less time. More blocks per cluster reduce
// a row's time; fewer blocks let the device hold more rows at once.
template <class T, Exp kExp>
int blocks_of_clusters(std::int64_t rows, int groups) {
  // With 16 blocks, a lane has one leaf in place of two with eight blocks.
  if (ClusterShape<8>::steps(groups) > 1 && rows <= held_clusters<T, kExp, 16>(groups)) return 16;
  const std::int64_t of_eight = held_clusters<T, kExp, 8>(groups);
  if (rows <= of_eight) return 8;
  // With few groups, half of the threads of eight blocks have no columns, and a second round takes longer than the
  // scans.
  const bool fills_eight = groups > 8;
  if (fills_eight && 3 * rows <= 4 * of_eight) return 8;  // two rounds: the second has few rows
  if (rows <= held_clusters<T, kExp, 2>(groups)) return 2;
  return fills_eight && rows <= 2 * of_eight ? 8 : 0;
}

// If only top_p cuts the rows of a call of few rows, this function computes the call and returns true. For any other
// call it computes nothing and returns false: calls with other cuts, with the n best, with greedy rows, with too many
// rows, or with too large a vocabulary. The result is also false if a group of leaves holds several parts of the
// vocabulary.
template <class T, Exp kExp>
bool run_cluster_rows(const SampleParams& p, const GroupGrid& grid, const SampleChunk& chunk, cudaStream_t stream) {
  const bool by_top_p_alone = cuts(p.top_p, 1.0f) && !cuts(p.top_k, 0) && !cuts(p.min_p, 0.0f);
  if (!by_top_p_alone || p.greedy || p.is_greedy != nullptr || p.top_ids != nullptr || chunk.rows != p.num_rows ||
      grid.groups_per_part == 0 || grid.groups > kMostGroups) {
    return false;
  }
  const int blocks = blocks_of_clusters<T, kExp>(chunk.rows, grid.groups);
  if (blocks == 16) launch_cluster_rows<T, kExp, 16>(p, grid, chunk, stream);
  if (blocks == 8) launch_cluster_rows<T, kExp, 8>(p, grid, chunk, stream);
  if (blocks == 2) launch_cluster_rows<T, kExp, 2>(p, grid, chunk, stream);
  return blocks != 0;
}

}  // namespace
}  // namespace rlk::cuda
