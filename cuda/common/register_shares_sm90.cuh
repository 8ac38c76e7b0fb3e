// Sets the number of registers per thread, for warpgroups that do different work.
#pragma once

namespace rlk::cuda {

// One warpgroup loads, and two or three warpgroups (kWarpgroups) multiply. At the launch all threads have equally many
// registers. With three warpgroups in all, each thread has 168, which is 504 for one thread of each warpgroup. With
// four warpgroups in all, each thread has 128, which is 512. If the new shares exceed this sum, claim() never returns.
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
