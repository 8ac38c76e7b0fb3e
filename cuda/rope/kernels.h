// Host entry points of the rope kernels, one per architecture, and the plans of a call. All plans give the same bits.
// rope.cpp checks the arguments.
#pragma once

#include <algorithm>

#include "../common/launch.h"
#include "kernels/rows/rope_rotate.h"
#include "kernels/rows/rope_vec8s.h"

namespace rlk::cuda {

constexpr int kRopeThreads = 128;    // threads per block
constexpr int kStreamThreads = 224;  // plan "streams": at most this many threads of a block rotate

// A plan of a call. A vec8 is eight neighbouring columns, aligned to 16 bytes. `heads`: a thread rotates two vec8s in
// each of `heads` heads of a token, and loads their angles once. If `heads` is 0, a thread rotates one pair of columns
// of one head, at any alignment. `streams` (sm_90): TMA copies whole tokens, whose heads must be contiguous in memory.
// `lanes` (sm_90): a thread rotates one vec8 in each of two heads; another lane of the warp has the second column of
// each pair.
struct RopePlan {
  int heads = 0;
  bool streams = false, lanes = false;
};
constexpr RopePlan kRopePlans[] = {{2, false, true}, {0, true}, {4}, {2}, {1}, {0}};
// `capability` is 10 * major + minor.
bool serves(const RopePlan& plan, const RopeParams& p, int capability);
RopePlan choose_plan(const RopeParams& p, int capability, int multiprocessors);

// Shared memory of the plan "streams": a ring of stages, each with a token's queries, keys and angles.
struct RopeStages {
  // kMost: the most stages. kWrites: the most stages that unfinished stores to global memory still read.
  static constexpr int kMost = 16, kWrites = 2;
  static constexpr int kBlocks = 2, kBytes = 110 << 10;  // blocks per multiprocessor; bytes per block
  std::int64_t q_bytes, k_bytes;
  std::int64_t row_bytes;  // bytes of one row of cos or of sin; for each section, a stage has a row of cos and one of
                           // sin
  std::int64_t bytes, stages;

  explicit RopeStages(const RopeParams& p)
      : q_bytes(p.q.num_heads * p.head_dim * size_of(p.dtype)),
        k_bytes(p.k.num_heads * p.head_dim * size_of(p.dtype)),
        row_bytes(p.width * size_of(p.angle_dtype)),
        bytes((q_bytes + k_bytes + 2 * p.num_sections * row_bytes + 127) / 128 * 128),
        stages(std::min<std::int64_t>(kMost, kBytes / std::max<std::int64_t>(bytes, 1))) {}
};

RLK_CUDA_KERNELS(void rope(const RopeParams& p, const RopePlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
