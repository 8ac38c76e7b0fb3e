// Nodes of the tree over leaves (128 columns): softmax statistics of some leaves of a row. The fused head's kernel
// writes these nodes, and the kernel of the outputs reads them.
#pragma once

#include "head_grid.h"
#include "pair_grid.h"
#include "rlk/math/softmax_stats.h"

namespace rlk::cuda {

// A node in memory. Without moments, a node has only its reference m and the sum of its exponentials relative to 2^m.
template <bool kMoments>
struct alignas(16) NodeOf {
  float m, S, E, Q;
  NodeOf() = default;
  __device__ __forceinline__ explicit NodeOf(const SoftmaxStats& s) : m(s.m), S(s.S), E(s.E), Q(s.Q) {}
  __device__ __forceinline__ SoftmaxStats stats() const { return {m, S, E, Q}; }
};
template <>
struct alignas(8) NodeOf<false> {
  float m, S;
  NodeOf() = default;
  __device__ __forceinline__ explicit NodeOf(const SoftmaxStats& s) : m(s.m), S(s.S) {}
  __device__ __forceinline__ SoftmaxStats stats() const { return {m, S, 0.0f, 0.0f}; }
};

// Arguments of the kernel of outputs.
template <bool kMoments>
struct PairNodes {
  HeadColumns columns;
  const ScoredGroups* groups;          // groups of the previous launch
  const NodeOf<kMoments>* nodes;       // [parts][nodes_per_part][padded rows], nodes of whole runs
  const NodeOf<kMoments>* pair_nodes;  // [single pairs][kPairLeaves][kPairRows], nodes of leaves
  const float* target_z;               // [rows]
  int row_blocks, blocks, padded_rows;
};

// A row's node over eight leaves: the stored node, or the tree over its stored leaves.
template <bool kMoments>
__device__ __forceinline__ SoftmaxStats node_of_part(const PairNodes<kMoments>& n, const PairItems& items, int row,
                                                     int part, int node) {
  const int run = node / kRunNodes, first_leaf = node % kRunNodes * kNodeLeaves;  // index in the run
  const int leaves = (columns_from(n.columns, part, run) + kLeafColumns - 1) / kLeafColumns;
  if (first_leaf >= leaves) return identity_stats();
  const int slot = first_slot(n.columns, items, row / kPairRows, part, run);
  if (slot < 0) {
    return n.nodes[std::int64_t{part * nodes_per_part(n.columns) + node} * n.padded_rows + row].stats();
  }
  SoftmaxStats tree[kNodeLeaves];
#pragma unroll
  for (int i = 0; i < kNodeLeaves; ++i) {
    const int leaf = first_leaf + i;
    tree[i] = identity_stats();
    if (leaf < leaves) {
      const std::int64_t at = std::int64_t{slot} * kPairLeaves + leaf;
      tree[i] = n.pair_nodes[at * kPairRows + row % kPairRows].stats();
    }
  }
#pragma unroll
  for (int distance = 1; distance < kNodeLeaves; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kNodeLeaves; i += 2 * distance) tree[i] = combine(tree[i], tree[i + distance]);
  }
  return tree[0];
}

}  // namespace rlk::cuda
