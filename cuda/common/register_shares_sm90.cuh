// The registers of warpgroups that have different work.
#pragma once

namespace rlk::cuda {

// One warpgroup loads, and kWarpgroups multiply. A launch of two allots 168 registers per thread, so 504 for one thread
// of each warpgroup. A launch of three allots 128, so 512. A claim beyond this sum never returns.
template <int kLoads, int kMultiplies, int kWarpgroups = 2>
struct RegisterShares {
  static_assert(kLoads % 8 == 0 && kMultiplies % 8 == 0 && kLoads >= 24);
  static_assert(kWarpgroups == 2 || kWarpgroups == 3);
  static_assert(kLoads + kWarpgroups * kMultiplies <= (kWarpgroups == 2 ? 504 : 512));
  static __device__ __forceinline__ void release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLoads));
  }
  static __device__ __forceinline__ void claim() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplies));
  }
};

}  // namespace rlk::cuda
