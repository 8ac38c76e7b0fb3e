// The registers of warpgroups that have different work.
#pragma once

namespace rlk::cuda {

// One warpgroup loads and two multiply. A launch allots 168 registers per thread, so 504 for one thread of each
// warpgroup. A claim beyond this sum never returns.
template <int kLoads, int kMultiplies>
struct RegisterShares {
  static_assert(kLoads % 8 == 0 && kMultiplies % 8 == 0 && kLoads >= 24);
  static_assert(kLoads + 2 * kMultiplies <= 504);
  static __device__ __forceinline__ void release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoads));
  }
  static __device__ __forceinline__ void claim() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplies));
  }
};

}  // namespace rlk::cuda
