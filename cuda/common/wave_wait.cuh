// Blocks that run at one time and multiply neighbouring tiles load the same operands. What they ask for together is read
// once; what one asks for later is read again, which costs energy and, at the power limit, time. Nothing keeps them
// together: a block that fell behind multiplies as fast as the others from then on. So their loaders wait for each other
// now and then, which decides when a stage is asked for and nothing else.
#pragma once

#include "rlk/base.h"

namespace rlk::cuda {
namespace {  // one count a translation unit

__device__ unsigned arrived_loaders;
constexpr unsigned kLoaderRound = 1024;  // all blocks of a launch, which are fewer, add this much together

// As long as a full ring of stages lasts, so that products go on meanwhile. A block may be absent, since another kernel
// has its multiprocessor; nobody waits for it any longer.
constexpr unsigned kMostWaitCycles = 4000;

__device__ __forceinline__ unsigned cycle() {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}

// By a thread of each block, and by all blocks as often. Launches that run at once wait in vain sometimes, and no more.
__device__ __forceinline__ void wait_for_other_loaders() {
  const unsigned mine = blockIdx.x == 0 ? kLoaderRound + 1 - gridDim.x : 1;
  const unsigned round = atomicAdd(&arrived_loaders, mine) / kLoaderRound, start = cycle();
  while (*const_cast<volatile unsigned*>(&arrived_loaders) / kLoaderRound == round &&
         cycle() - start < kMostWaitCycles) {
  }
}

}  // namespace
}  // namespace rlk::cuda
