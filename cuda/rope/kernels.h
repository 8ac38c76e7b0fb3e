// Host entry points of the rope kernels, one per architecture, and the ways in which each can serve a call. All have the
// same bits. Arguments were checked in rope.cpp.
#pragma once

#include "../common/launch.h"
#include "rlk/kernels/rope_rotate.h"
#include "rlk/kernels/rope_vec8s.h"

namespace rlk::cuda {

constexpr int kRopeThreads = 128;  // threads per block

// A thread has two times eight columns, at vectors of 16 bytes, of `heads` heads of a token, whose angles it loads once;
// 0 heads: a pair of one head, at any alignment.
struct RopePlan {
  int heads = 0;
};
constexpr RopePlan kRopePlans[] = {{4}, {2}, {1}, {0}};
bool serves(const RopePlan& plan, const RopeParams& p);
RopePlan choose_plan(const RopeParams& p, int multiprocessors);

RLK_CUDA_KERNELS(void rope(const RopeParams& p, const RopePlan& plan, cudaStream_t stream);)

}  // namespace rlk::cuda
