// Host entry points of the rope kernels, one per architecture, and the plans of each. All plans have the same bits.
// rope.cpp checks the arguments.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/rope_rotate.h"
#include "rlk/kernels/rope_vec8s.h"

namespace rlk::cuda {

constexpr int kRopeThreads = 128;  // threads per block

// A thread has two vec8s of `heads` heads of a token, aligned to 16 bytes, and loads their angles once. 0 heads: a
// thread has a pair of one head, at any alignment.
struct RopePlan {
  int heads = 0;
};
constexpr RopePlan kRopePlans[] = {{4}, {2}, {1}, {0}};
bool serves(const RopePlan& plan, const RopeParams& p);
RopePlan choose_plan(const RopeParams& p, int multiprocessors);

RLK_CUDA_KERNELS(void rope(const RopeParams& p, const RopePlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
