// Concurrent blocks that multiply neighbouring tiles load the same operands. Lines that the blocks request together are
// read once. A late request reads the tiles again, which costs energy and, at the power limit, time. A block that fell
// behind never catches up, since all blocks multiply equally fast. The blocks' loaders therefore sometimes wait for
// each other. The wait changes only the time at which a stage is requested.
#pragma once

#include "rlk/base.h"

namespace rlk::cuda {
namespace {  // one count per translation unit

__device__ unsigned arrived_loaders;
constexpr unsigned kLoaderRound = 1024;  // the blocks of one round together add kLoaderRound; a launch has fewer blocks

// A full ring of stages lasts this long, so products continue during the wait. A block may be absent because another
// kernel has its multiprocessor. A wait for an absent block ends after this time.
constexpr unsigned kMostWaitCycles = 4000;

__device__ __forceinline__ unsigned cycle() {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}

// One thread of each block calls this function, and all blocks call the function equally often. Two launches at the
// same time share the counter: a block may then wait for up to kMostWaitCycles without need.
__device__ __forceinline__ void wait_for_other_loaders() {
  const unsigned mine = blockIdx.x == 0 ? kLoaderRound + 1 - gridDim.x : 1;
  const unsigned round = atomicAdd(&arrived_loaders, mine) / kLoaderRound, start = cycle();
  while (*const_cast<volatile unsigned*>(&arrived_loaders) / kLoaderRound == round &&
         cycle() - start < kMostWaitCycles) {
  }
}

}  // namespace
}  // namespace rlk::cuda
