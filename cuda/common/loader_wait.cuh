// A wait that makes the loading warps of all blocks of threads request data at about the same time. Concurrent blocks
// that compute neighbouring tiles load the same operands. If the blocks request a line of memory at about the same
// time, the line is read from HBM once. If one block requests the line much later, it is read again, which costs energy
// and, at the power limit, time. A block that fell behind never catches up by itself, since all blocks multiply at the
// same speed. So the loading warps of all blocks sometimes wait for each other. The wait changes no result.
#pragma once

#include "rlk/base.h"

namespace rlk::cuda {
namespace {  // each translation unit has its own counter

__device__ unsigned arrived_loaders;
constexpr unsigned kLoaderRound = 1024;  // in a round all blocks together add kLoaderRound; a launch has fewer blocks

// The longest wait. Multiplying a full ring of stages takes this long, so products continue during the wait. The wait
// needs a limit because another kernel may occupy a multiprocessor, and a block may then begin late.
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
