// Sets the number of registers per thread, for warpgroups that do different work.
#pragma once

namespace rlk::cuda {

// One warpgroup loads, and kWarpgroups warpgroups multiply. With two of these, the launch gives each thread 168
// registers, which is 504 for one thread of each of the three warpgroups. With three, it gives each thread 128, which
// is 512. claim() never returns if the shares together exceed this sum.
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
