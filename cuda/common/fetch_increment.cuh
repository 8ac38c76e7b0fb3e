// Work claimed by the warps of a launch from counters in global memory.
#pragma once

namespace rlk::cuda {

// Adds one to a counter and returns what was there before. An increment with a bound, since the compiler makes an
// addition by one lane an aggregated one, which waits for its result at once.
__device__ __forceinline__ unsigned fetch_increment(unsigned* counter) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(0x7fffffffu)
               : "memory");
  return before;
}

}  // namespace rlk::cuda
