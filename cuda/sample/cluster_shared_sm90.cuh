// The shared memory of a block in a cluster that cuts a row by top_p (cluster_cut_sm90.cuh), and accesses to the shared
// memory of other blocks.
#pragma once

#include "../common/cluster_sm90.cuh"
#include "draw.cuh"
#include "leaf_scan.cuh"

namespace rlk::cuda {
namespace {

constexpr int kGroupWarps = 8;   // warps per group of 32 leaves; a warp has four leaves
constexpr int kMostGroups = 48;  // groups of a row
constexpr int kMostAtCut = 512;  // columns of the cut's bin that shared memory can list
constexpr int kFineBins = 512;   // finer bins that divide that list

// Leaves that a lane of a cluster processes, one after another. `at_once`: groups that the cluster processes at once.
RLK_HD constexpr int cluster_steps(int groups, int at_once) { return (groups + at_once - 1) / at_once; }

// How a cluster of kBlocks blocks computes a row. A block of 32 warps fills a multiprocessor, like two blocks of 16.
template <int kBlocks>
struct ClusterShape {
  static_assert(kBlocks == 2 || kBlocks == 8 || kBlocks == 16);
  static constexpr bool kIsLarge = kBlocks == 2;
  static constexpr int kWarps = kIsLarge ? 32 : 16, kThreads = kWarps * kWarp;
  static constexpr int kResident = kBlocks == 8 ? 2 : 1;      // minimum of resident blocks per multiprocessor
  static constexpr int kGroupsAtOnce = kWarps / kGroupWarps;  // groups of 32 leaves that a block processes at once
  static constexpr int kMostRowGroups = kIsLarge ? 32 : kMostGroups;  // groups of a row
  static constexpr int kAtOnce = kBlocks * kGroupsAtOnce;             // groups that the cluster processes at once
  RLK_HD static constexpr int steps(int groups) { return cluster_steps(groups, kAtOnce); }
  static constexpr int kSteps = cluster_steps(kMostRowGroups, kAtOnce);
  // Steps whose columns shared memory holds: all steps, or two steps of a block that alone fills a multiprocessor.
  static constexpr int kSlots = kIsLarge ? 2 : kSteps;
  static constexpr int kGroups = kSteps * kGroupsAtOnce;  // groups per block
};

// The number of a block's open columns, and the keys (key_of) of their smallest and largest z.
struct alignas(16) OpenColumns {
  std::uint32_t count, low, high;
};

// The shared memory of a block in a cluster of kBlocks blocks.
template <int kBlocks>
struct ClusterShared {
  using Shape = ClusterShape<kBlocks>;
  static constexpr int kWarps = Shape::kWarps, kSteps = Shape::kSteps, kGroups = Shape::kGroups;
  static constexpr int kBinsOfBlock = kDigitBins / kBlocks, kBinsOfWarp = kBinsOfBlock / kWarps;

  // Masses of the block's columns: lower halves, then upper halves. The lower halves lie in all banks of shared memory,
  // and so do the upper halves. Behind the bins, each lane has a word to which its columns without mass add.
  alignas(16) std::uint32_t bins[2][kDigitBins + kWarp];
  std::uint64_t sums[kBinsOfBlock];       // masses of all blocks' columns, for the bins that this block sums
  std::uint64_t parts[kBlocks * kWarps];  // one sum for every kBinsOfWarp bins, from all blocks
  std::uint64_t found[kMostAtCut];        // ranks of the block's columns in the cut's bin
  // Ranks of all blocks' columns in the cut's bin, and their masses.
  std::uint64_t list[kMostAtCut], masses[kMostAtCut];
  uint4 masks[kGroups][kGroupLeaves];  // kept columns
  float2 nodes[kGroups][kGroupLeaves];
  float tops[kGroups][kGroupLeaves];        // the largest z of each leaf
  float2 roots[kMostSlots / kWarp];         // roots of the groups of all blocks
  int2 columns[kGroups];                    // each group's first column, and the end of its part
  float2 of_warps[kWarps], range[kBlocks];  // largest and smallest value
  alignas(16) std::uint16_t open[kSteps][Shape::kThreads];
  OpenColumns of_open;
  std::uint32_t open_of_group[kGroups];  // open columns of each group
  std::uint32_t counts[kMostGroups];     // kept columns of each group
  std::uint32_t words[kDrawWords];
  std::uint64_t goal, before, last;
  std::int64_t begin;
  int bin;
  std::uint32_t num_fine;
  std::uint16_t fine[2][kMostAtCut];  // the list's columns in the cut's finer bin, by z and then by id
};

template <class N>
__device__ __forceinline__ N load_remote(const N* of_block, int rank) {
  const std::uint32_t address = map_to_rank(shared_address(of_block), static_cast<std::uint32_t>(rank));
  static_assert(sizeof(N) == 4 || sizeof(N) == 8 || sizeof(N) == 16);
  N x;
  if constexpr (sizeof(N) == 4) {
    std::uint32_t w;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
    memcpy(&x, &w, sizeof x);
  } else if constexpr (sizeof(N) == 8) {
    std::uint64_t w;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(w) : "r"(address) : "memory");
    memcpy(&x, &w, sizeof x);
  } else {
    std::uint32_t w[4];
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(address)
                 : "memory");
    memcpy(&x, w, sizeof x);
  }
  return x;
}
__device__ __forceinline__ void store_remote_u64(std::uint32_t remote, std::uint64_t x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(remote), "l"(x) : "memory");
}

}  // namespace
}  // namespace rlk::cuda
