// A wait that keeps the loading warps of all blocks of threads together. Concurrent blocks that compute neighbouring
// tiles load the same operands. If the blocks request a line of memory at about the same time, it is read once. A late
// request reads the line again, which costs energy and, at the power limit, time. A block that fell behind never
// catches up, since all blocks multiply equally fast. So the blocks' loaders sometimes wait for each other. The wait
// changes no result, only the time at which a stage is requested.
#pragma once

#include "rlk/base.h"

namespace rlk::cuda {
namespace {  // each translation unit has its own counter

__device__ unsigned arrived_loaders;
constexpr unsigned kLoaderRound = 1024;  // all blocks together add kLoaderRound per round; a launch has fewer blocks

// The longest wait. The stages of a full ring last this long, so products continue during the wait. The limit is needed
// because a block may not run yet, if another kernel occupies its multiprocessor.
constexpr unsigned kMostWaitCycles = 4000;

__device__ __forceinline__ unsigned cycle() {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}

// One thread of each block calls this function, and all blocks must call it equally often. Two launches that run at the
// same time share the counter, so a block may then wait for up to kMostWaitCycles without need.
__device__ __forceinline__ void wait_for_other_loaders() {
  const unsigned mine = blockIdx.x == 0 ? kLoaderRound + 1 - gridDim.x : 1;
  const unsigned round = atomicAdd(&arrived_loaders, mine) / kLoaderRound, start = cycle();
  while (*const_cast<volatile unsigned*>(&arrived_loaders) / kLoaderRound == round &&
         cycle() - start < kMostWaitCycles) {
  }
}

}  // namespace
}  // namespace rlk::cuda
