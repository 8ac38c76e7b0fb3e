// Counters in global memory from which the warps of a launch take numbers of work items.
#pragma once

namespace rlk::cuda {

// Adds one to a counter and returns the previous value. The instruction is an atomic increment with a bound, whose
// result may arrive later. The compiler would turn an atomic addition into a warp-aggregated addition, and that waits
// at once for the result.
__device__ __forceinline__ unsigned fetch_increment(unsigned* counter) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(0x7fffffffu)
               : "memory");
  return before;
}

}  // namespace rlk::cuda
