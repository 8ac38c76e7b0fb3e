// Shapes of the launches of logprob, for the kernels and for the host.
#pragma once

#include <cstddef>

#include "kernels/vocabulary/logprob_groups.h"

namespace rlk::hip {

constexpr int kGroupThreads = 64;  // a wave
constexpr int kLeafPad = 16;       // padding after each leaf in LDS, so that lanes at the same column hit different
                                   // banks
constexpr int kKeptWords = kGroupColumns / 32;

constexpr int leaf_bytes(int element_bytes) { return kLeafColumns * element_bytes + kLeafPad; }
// LDS of a group: the leaves, and the bitmap of columns that the row keeps
constexpr std::size_t group_lds_bytes(DType t) {
  return static_cast<std::size_t>(kGroupLeaves * leaf_bytes(size_of(t)) + kKeptWords * 4);
}

constexpr int kBackwardThreads = 256;
constexpr int kBackwardColumns = 8;  // neighbouring columns that a thread computes
constexpr int kSegmentColumns = kBackwardThreads * kBackwardColumns;
constexpr std::size_t kBackwardLds = kSegmentColumns / 8;  // bytes of the bitmap of columns that the row keeps

constexpr int kMergeThreads = 128;

}  // namespace rlk::hip
